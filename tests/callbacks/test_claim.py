"""A run folder belongs to one program while it trains; a start that fails, or trains nothing, leaves none."""

import os
import signal

import pytest
from conftest import tiny_task, tiny_trainer, train
from lightning.pytorch import Callback

from uvit_decay.callbacks import LastCheckpoint, RunLogger
from uvit_decay.callbacks.resumption import by_name
from uvit_decay.checkpoint.newest import newest_whole, run_folders
from uvit_decay.data import Digits
from uvit_decay.runtime.errors import UserError, user_errors
from uvit_decay.runtime.files import is_claimed
from uvit_decay.runtime.signals import stoppable

TINY = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.limit_val_batches=0", "--trainer.callbacks=[]"]


class At(Callback):
    """Calls a function in a hook."""

    def __init__(self, hook, function) -> None:
        setattr(self, hook, lambda *_, **__: function())


def fit(folder, *callbacks, version=None, max_steps=4, **options):
    logger = RunLogger("x", str(folder), version)
    trainer = by_name(
        tiny_trainer(folder, LastCheckpoint(2), *callbacks, max_steps=max_steps, logger=logger, **options)
    )
    trainer.fit(tiny_task(), Digits(32))


def test_no_program_goes_on_from_a_run_that_is_not_over_or_writes_into_its_folder(tmp_path):
    folder, seen = tmp_path / "x" / "version_0", []

    def meanwhile():
        seen.append(is_claimed(folder))
        with pytest.raises(UserError, match="a program that still runs is writing .*/version_0: wait for its end"):
            newest_whole(run_folders(tmp_path / "x"), lambda _: True)
        assert newest_whole(run_folders(tmp_path / "x"), lambda _: False) is None  # one of another seed may
        with pytest.raises(UserError, match="another program is writing .*/version_0"):
            fit(tmp_path, version=0)
        assert folder.exists()

    fit(tmp_path, At("on_train_start", meanwhile))
    assert seen == [True]
    assert not is_claimed(folder)
    (folder / ".lock").touch()  # as a killed program leaves it
    assert not is_claimed(folder)
    assert newest_whole(run_folders(tmp_path / "x"), lambda _: True).step == 4


def interrupted():
    raise KeyboardInterrupt


def terminated():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("hook", "strike", "code"),
    [("setup", interrupted, 130), ("setup", terminated, 143), ("on_train_start", interrupted, 130)],
)
def test_a_run_that_is_stopped_before_its_first_step_leaves_no_folder(tmp_path, hook, strike, code):
    with pytest.raises(SystemExit) as stop, user_errors(), stoppable():
        fit(tmp_path, At(hook, strike))
    assert stop.value.code == code
    assert not list((tmp_path / "x").iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.max_steps=0"], "--trainer.max_steps 0 trains nothing"),
        (["--data=uvit_decay.data.CIFAR10", "--data.path=nowhere"], "no CIFAR10 at nowhere"),
        (
            ["--ckpt_path={trained}", "--trainer.max_epochs=1", "--trainer.limit_train_batches=6"],
            "the end: set --trainer",
        ),
    ],
)
def test_a_start_that_fails_leaves_no_folder(trained, tmp_path, monkeypatch, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        train(monkeypatch, tmp_path, "fit", *TINY, *(flag.format(trained=trained) for flag in flags))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/digits/*"))


def test_a_run_without_time_leaves_no_folder(tmp_path, monkeypatch):
    train(monkeypatch, tmp_path, "fit", *TINY, "--trainer.max_time=00:00:00:00")
    assert not list(tmp_path.glob("runs/digits/*"))
