"""Settings of a resumed run that differ from those before: which are free, which must be allowed, which cannot be."""

import shutil

import pytest
from conftest import tiny_net, tiny_task, tiny_trainer, train
from refusals import find_line, raises_user_error, refused

from uvit_decay.data import Images
from uvit_decay.runs.settings import (
    DECIDES,
    FORMS,
    FREE,
    Change,
    allows,
    compare_settings,
    explain_refusal,
    find_effect,
    is_same_run,
)
from uvit_decay.tasks.file_digests import digest_files

TINY = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=[]", "--trainer.limit_val_batches=0"]


def test_what_may_differ_is_named_but_tensors_that_do_not_fit_are_refused_all_the_same(
    trained, tmp_path, monkeypatch, capsys
):
    flags = [*TINY, "--trainer.max_steps=13", f"--ckpt_path={trained}", "--resume.allow=all"]
    for flag in ("--model.net.dim=32", "--model.net.alpha_min=1.0", "--model.optim.decay_on=matrices"):
        assert "--resume.allow" not in refused(capsys, train, monkeypatch, tmp_path, "fit", *flags, flag)
    assert not list((tmp_path / "runs" / "digits").glob("*"))
    train(monkeypatch, tmp_path, "fit", *flags, "--model.net.heads=4")
    assert "step 13/13" in capsys.readouterr().err


def test_the_same_images_in_another_folder_are_no_other_data_and_other_images_are(image_dir, tmp_path, caplog):
    def part(path, ckpt_path=None):
        task = tiny_task(tiny_net(num_classes=2))
        task.settings = {"data.path": str(path), "model.optim.lr": 1e-3}
        trainer = tiny_trainer(tmp_path, max_steps=3 if ckpt_path else 2)
        images = Images(str(path), image_size=8, channels=1, batch_size=4)
        trainer.fit(task, images, ckpt_path=ckpt_path)

    moved = tmp_path / "moved"
    shutil.copytree(image_dir, moved)
    part(image_dir)
    path = tmp_path / "checkpoints" / "last.ckpt"
    kept = shutil.copy(path, tmp_path / "kept.ckpt")
    part(moved, ckpt_path=kept)
    assert "other settings" not in caplog.text
    (moved / "cat" / "00.png").unlink()
    with raises_user_error("data", "moved", "'[data]'"):
        part(moved, ckpt_path=kept)


def test_a_file_that_a_setting_names_is_compared_by_its_contents(tmp_path):
    paths = [tmp_path / name for name in ("a.pt", "b.pt", "other.pt")]
    for path, text in zip(paths, ("one", "one", "two"), strict=True):
        path.write_text(text)

    def settings(value):
        found = {"model.auxiliary.REPA.teacher": str(value), "model.init_from": str(paths[2]), "model.text": "x" * 9999}
        return found | digest_files(found)

    before = settings(paths[0])
    assert len(before) == 4  # the teacher's checksum is added: what a run begins with does not shape it any more
    assert is_same_run(before, settings(paths[1]))  # the same file in another place
    assert not is_same_run(before, settings(paths[2]))
    several = digest_files({"model.tables": [str(paths[0]), f"timm:vit={paths[2]}"]})
    assert len(several["model.tables.sha256"].split()) == 2
    paths[0].write_text("another")
    (change,) = compare_settings(before, settings(paths[0]))
    assert (change.name, change.flag, change.effect) == ("model.auxiliary.REPA.teacher.sha256", "", DECIDES)
    assert not is_same_run(before, settings(paths[0]))


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("trainer.max_steps", FREE),
        ("trainer.callbacks.Preview.rows", FREE),
        ("data.path", FREE),
        ("data.batch_size", DECIDES),
        ("trainer.callbacks.EMA.decay", DECIDES),
        ("model.optim.optimizer", FORMS),
    ],
)
def test_the_longest_name_says_what_a_setting_does(name, effect):
    assert find_effect(name) == effect


def test_a_setting_or_a_group_or_all_may_be_allowed():
    assert allows(["model.optim"], "model.optim.lr")
    assert allows(["all"], "seed_everything")
    assert not allows(["model.optim.lr"], "model.optim.lr_scale")
    before, now = {"model.optim.lr": 1.0, "data.batch_size": 4}, {"model.optim.lr": 2.0, "data.batch_size": 4}
    assert not is_same_run(before, now)
    assert is_same_run(before, now, ["model.optim"])


@pytest.mark.parametrize("name", ["model.init_from", "model.net.zero_init"])
def test_a_run_that_began_otherwise_is_another_but_goes_on_if_it_is_named(name):
    before = {"model.optim.lr": 1.0, name: None}
    assert find_effect(name) != DECIDES
    assert is_same_run(before, dict(before))
    assert not is_same_run(before, {**before, name: "true"})
    assert is_same_run(before, {**before, name: "true"}, [name])


def test_a_default_of_the_optimizer_that_is_written_out_does_not_differ():
    """Without --model.optim.lr and blr the rate is 2e-4."""
    names = ("lr", "warmup_steps", "blr", "warmup_epochs")

    def build_settings(*values):
        return {f"model.optim.{name}": value for name, value in zip(names, values, strict=False)}

    assert compare_settings(build_settings(2e-4, 2500, None, None), build_settings(None, None, None, None)) == []
    assert compare_settings(build_settings(None, None, 1e-3, 5.0), build_settings(None, None, 1e-3, 5.0)) == []
    (change,) = compare_settings(build_settings(2e-4, 2500, None, None), build_settings(1e-3, None, None, None))
    assert str(change) == "model.optim.lr 0.001 (was 0.0002)"


def test_an_option_that_came_later_had_its_default():
    before = {"trainer.callbacks.EMA.class_path": "uvit_decay.callbacks.EMA", "trainer.callbacks.EMA.decay": 0.9}
    now = {**before, "trainer.callbacks.EMA.ramp": True, "trainer.callbacks.EMA.ramp_steps": None}
    assert compare_settings(before, now) == []
    (change,) = compare_settings(before, {**now, "trainer.callbacks.EMA.ramp": False})
    assert str(change) == "trainer.callbacks.EMA.ramp False (was True)"
    (change,) = compare_settings(before, {**now, "trainer.callbacks.EMA.ramp_steps": 100})
    assert str(change) == "trainer.callbacks.EMA.ramp_steps 100 (was None)"


@pytest.mark.parametrize(
    ("name", "before", "typed"),
    [
        ("model.optim.lr", None, "`model.optim.lr` null"),
        ("model.optim.betas", [0.9, 0.99], "`model.optim.betas` '[0.9, 0.99]'"),
        ("data.classes", "my classes.txt", "`data.classes` 'my classes.txt'"),
        ("model.net.class_path", "uvit_decay.nn.UViT", ("`model.net`", "uvit_decay.nn.UViT")),
        ("trainer.callbacks.EMA.decay", 0.9, ("EMA in `trainer.callbacks`", "decay 0.9")),
    ],
)
def test_a_refusal_names_what_can_be_typed(name, before, typed):
    text = explain_refusal("last.ckpt", (), [Change(name, before, "other")])
    find_line(text, typed, f"`resume.allow` '[{name}]'")
    assert (f"`{name}`" in text) == isinstance(typed, str)
