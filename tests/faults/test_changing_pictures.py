"""Pictures that change or disappear while a program reads them: noticed in one line, and never a mixed result."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT
from PIL import Image
from programs import Moment
from small_programs import SmallPrograms, contents, stopped


def turn(path: Path) -> None:
    """Make another picture of it, of the same name and size."""
    with Image.open(path) as image:
        image.transpose(Image.Transpose.ROTATE_180).save(path)


CHANGES: dict[str, tuple[Callable[[list[Path]], None], str]] = {  # of sorted pictures, and what is said
    "disappears": (lambda paths: paths[-1].unlink(), "No such file"),
    "is cut short": (lambda paths: paths[-1].write_bytes(paths[-1].read_bytes()[:60]), "cannot be"),
    "changes later": (lambda paths: turn(paths[-1]), "has changed while its features were extracted"),
    "changed before": (lambda paths: turn(paths[0]), "has changed while its features were extracted"),
}


@pytest.fixture
def own(small_programs, tmp_path) -> Callable[[str], tuple[SmallPrograms, Path, Path]]:
    """Programs with a copy of an input, that copy, and the original."""

    def copied(name: str) -> tuple[SmallPrograms, Path, Path]:
        original = small_programs.inputs[name]
        copy = shutil.copytree(original, tmp_path / original.name)
        return SmallPrograms(small_programs.launcher, {**small_programs.inputs, name: copy}), copy, original

    return copied


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "out"), [("statistics", "stats.npz"), ("evaluate images", "report.json")])
def test_pictures_that_change_while_they_are_judged_are_noticed(
    small_programs, own, tmp_path, name, out, change, exhaustive, record_property
):
    if not exhaustive and (name == "evaluate images" or change in ("disappears", "changes later")):
        pytest.skip("with --exhaustive")
    programs, pictures, original = own("digits")
    expected, _ = small_programs.undisturbed(name, tmp_path / "undisturbed")
    part = Moment("FeatureStore.add", 25 if name == "evaluate images" else 2, 0)  # the reference comes first
    program = stopped(programs.start(name, tmp_path / "a", at=part, number=signal.SIGSTOP))
    CHANGES[change][0](sorted(pictures.iterdir()))
    program.send(signal.SIGCONT)
    code, left = program.wait(), contents(tmp_path / "a")
    shutil.copytree(original, pictures, dirs_exist_ok=True)  # with the times of the original
    again = programs.run(name, tmp_path / "a")
    good = again.wait() == 0 and contents(tmp_path / "a")[out] == expected[out]
    row = {"fault": "a picture changes or disappears", "tries": 1, "survived": int(good and code == 2)}
    record_property("fault", row)
    assert code == 2, program.stderr
    assert program.last_line.startswith("error: ")
    assert CHANGES[change][1] in program.last_line
    assert out not in left
    assert good, again.stderr


@pytest.mark.slow
def test_a_picture_that_disappears_while_latents_are_made_is_named(small_programs, own, tmp_path, record_property):
    programs, pictures, original = own("images")
    expected, _ = small_programs.undisturbed("encode", tmp_path / "undisturbed")
    at = Moment("write_shard", 2, 0)
    program = stopped(programs.start("encode", tmp_path / "a", at=at, number=signal.SIGSTOP))
    gone = max(pictures.rglob("*.png"))
    gone.unlink()
    program.send(signal.SIGCONT)
    code = program.wait()
    shutil.copytree(original, pictures, dirs_exist_ok=True)
    again = programs.run("encode", tmp_path / "a")
    shards = {name: data for name, data in expected.items() if "shard" in name}
    good = again.wait() == 0 and shards.items() <= contents(tmp_path / "a").items()
    row = {"fault": "a picture changes or disappears", "tries": 1, "survived": int(good and code == 2)}
    record_property("fault", row)
    assert code == 2, program.stderr
    assert program.last_line.startswith("error: ")
    assert gone.name in program.last_line
    assert good, again.stderr


@pytest.mark.slow
def test_pictures_that_disappear_in_training_are_one_line_and_the_run_goes_on(
    programs, image_dir, tmp_path, record_property
):
    pictures = shutil.copytree(image_dir, tmp_path / "pictures")
    data = {"path": str(pictures), "image_size": 8, "batch_size": 4, "memory_gb": 0, "num_workers": 2}
    content = yaml.safe_load((ROOT / "configs" / "digits.yaml").read_text())
    content["data"] = {"class_path": "uvit_decay.data.Images", "init_args": data}
    last = {"class_path": "uvit_decay.callbacks.LastCheckpoint", "init_args": {"every_n_steps": 2}}
    content["trainer"]["callbacks"] = [last]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    net = ["--model.net.dim=16", "--model.net.depth=2", "--model.net.channels=3", "--model.net.num_classes=2"]
    command = ["train.py", "fit", "--config", "small.yaml", *net, "--trainer.max_steps=12", "--trainer.logger=false"]
    whole = programs.run(*command, "--trainer.default_root_dir=whole", cwd=tmp_path)
    assert whole.wait() == 0, whole.stderr
    at = Moment("Task.optimizer_step", 4, 0)
    options = [*command, "--trainer.default_root_dir=run"]
    program = stopped(programs.start(*options, cwd=tmp_path, at=at, number=signal.SIGSTOP))
    shutil.rmtree(pictures / "cat")
    program.send(signal.SIGCONT)
    assert program.wait() == 2, program.stderr
    assert program.last_line.startswith("error: ")
    assert str(pictures) in program.last_line
    shutil.copytree(image_dir, pictures, dirs_exist_ok=True)
    resumed = programs.run(*options, "--ckpt_path=last", cwd=tmp_path)
    assert resumed.wait() == 0, resumed.stderr
    one, two = (weights(tmp_path / run) for run in ("whole", "run"))
    good = one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    record_property("fault", {"fault": "a picture changes or disappears", "tries": 1, "survived": int(good)})
    assert good


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path = max(folder.rglob("last.ckpt"))  # of the newest run
    return torch.load(path, weights_only=False)["state_dict"]
