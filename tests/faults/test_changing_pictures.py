"""Pictures that change or disappear while a program reads them: noticed in one line, and never a mixed result."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from image_noise import turn
from programs import Moment
from refusals import find_line
from small_programs import SmallPrograms, contents

CHANGES: dict[str, tuple[Callable[[list[Path]], None], str]] = {  # of sorted pictures, and what is said
    "disappears": (lambda paths: paths[-1].unlink(), "No such file"),
    "cut short": (lambda paths: paths[-1].write_bytes(paths[-1].read_bytes()[:60]), "cannot be"),
    "changed before": (lambda paths: turn(paths[0]), "changed"),
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("change", CHANGES)
def test_pictures_that_change_meanwhile_are_noticed(small_programs, tmp_path, change, exhaustive):
    if not exhaustive and change == "disappears":
        pytest.skip("with --exhaustive")
    original = small_programs.inputs["digits"]
    pictures = shutil.copytree(original, tmp_path / original.name)
    programs = SmallPrograms(small_programs.launcher, {**small_programs.inputs, "digits": pictures})
    name, out = "statistics", "stats.npz"
    expected, _ = small_programs.undisturbed(name, tmp_path / "undisturbed")
    at = Moment("FeatureStore.add", 2, 0)
    program = programs.start(name, tmp_path / "a", at=at, number=signal.SIGSTOP).stopped()
    CHANGES[change][0](sorted(pictures.iterdir()))
    program.send(signal.SIGCONT)
    code, left = program.wait(), contents(tmp_path / "a")
    shutil.copytree(original, pictures, dirs_exist_ok=True)  # with the times of the original
    assert code == 2, program.stderr
    assert program.last_line.startswith("error: ")
    find_line(program.last_line, CHANGES[change][1])
    assert out not in left
    again = programs.start(name, tmp_path / "a")
    assert again.wait() == 0, again.stderr
    assert contents(tmp_path / "a")[out] == expected[out]


def test_pictures_that_disappear_in_training_are_one_line_and_the_run_goes_on(programs, image_dir, tmp_path):
    pictures = shutil.copytree(image_dir, tmp_path / "pictures")
    data = {"path": str(pictures), "image_size": 8, "batch_size": 4, "memory_gb": 0, "num_workers": 2}
    content = yaml.safe_load((ROOT / "configs" / "digits.yaml").read_text())
    content["data"] = {"class_path": "uvit_decay.data.Images", "init_args": data}
    last = {"class_path": "uvit_decay.callbacks.LastCheckpoint", "init_args": {"every_n_steps": 2}}
    content["trainer"]["callbacks"] = [last]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    net = ["--model.net.dim=16", "--model.net.depth=2", "--model.net.channels=3", "--model.net.num_classes=2"]
    command = ["train.py", "fit", "--config", "small.yaml", *net, "--trainer.max_steps=12", "--trainer.logger=false"]
    at = Moment("Task.optimizer_step", 4, 0)
    program = programs.start(*command, cwd=tmp_path, at=at, number=signal.SIGSTOP).stopped()
    shutil.rmtree(pictures / "cat")
    program.send(signal.SIGCONT)
    assert program.wait() == 2, program.stderr
    assert program.last_line.startswith("error: ")
    assert str(pictures) in program.last_line
    shutil.copytree(image_dir, pictures, dirs_exist_ok=True)
    resumed = programs.start(*command, "--ckpt_path=last", cwd=tmp_path)
    assert resumed.wait() == 0, resumed.stderr
    assert "Restoring states from the checkpoint path" in resumed.stderr
