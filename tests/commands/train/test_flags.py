"""Errors of arguments name the flags of train.py."""

from functools import partial

import pytest
from conftest import train
from refusals import find_line, refused

from uvit_decay.commands.train.flags import find_flag
from uvit_decay.terminal.errors import UserError, name_flags, with_flags

CONFIG = {
    "seed_everything": 0,
    "data": {"class_path": "uvit_decay.data.Images", "init_args": {"path": "pictures", "holdout": 0.1, "seed": 1}},
    "model": {
        "class_path": "uvit_decay.tasks.DiffusionTask",
        "init_args": {"path": None, "optim": {"lr": 1e-4}, "net": {"class_path": "UViT", "init_args": {"dim": 8}}},
    },
    "trainer": {
        "callbacks": [{"class_path": "EMA", "init_args": {"decay": 0.9, "seed": 2}}, {"class_path": "Summary"}]
    },
}


class Images:
    def fail(self):
        raise UserError("no such folder", argument="path")

    def remark(self):
        return with_flags("`path`, but `magic`")


class Folder(Images):
    """A subclass, as the data modules of a user."""


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("holdout", "--data.holdout"),
        ("lr", "--model.optim.lr"),
        ("dim", "--model.net.dim"),
        ("decay", "--trainer.callbacks.decay"),
        ("seed_everything", "--seed_everything"),
        ("model.net.dim", "--model.net.dim"),
        ("seed", "--data.seed"),  # also of a callback
        ("path", None),  # of the data and of the task
        ("magic", None),
    ],
)
def test_an_argument_has_its_flag(name, flag):
    assert find_flag(CONFIG, name, []) == flag


def test_of_two_arguments_a_message_means_the_one_of_the_object_that_wrote_it():
    with pytest.raises(UserError, match="--data.path: no such folder"), name_flags(partial(find_flag, CONFIG)):
        Folder().fail()
    with name_flags(partial(find_flag, CONFIG)):
        assert Folder().remark() == "--data.path, but `magic`"
    assert Folder().remark() == "`path`, but `magic`"


def test_a_run_names_the_flag(tmp_path, monkeypatch, capsys):
    flags = ["--trainer.accumulate_grad_batches=2", "--trainer.max_steps=1"]
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *flags)
    find_line(line, "--trainer.accumulate_grad_batches 2", "--data.device_batch_size")
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", "--model.optim.schedule=wsd")
    find_line(line, "wsd", "--model.optim.cooldown")
