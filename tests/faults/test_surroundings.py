"""Odd circumstances: an output that nobody reads, a second program, a shared cache, no POSIX."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from programs import Moment
from refusals import find_line
from small_programs import COMMANDS, DIGITS, contents, skip_unless_tried

SURROUNDED = "tests/shared/surroundings.py"
CODES = {"closed": 0, "no-reader": 141, "full-output": 2}
LINES = {
    "closed": "",
    "no-reader": "output",
    "full-output": ("error", "No space left on device"),
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("circumstance", CODES)
def test_what_cannot_be_printed_costs_no_file(small_programs, tmp_path, circumstance, exhaustive):
    for name in COMMANDS if exhaustive else ["export"]:
        expected, _ = small_programs.undisturbed(name, tmp_path / f"{name} undisturbed")
        program = small_programs.start(name, tmp_path / name, before=[SURROUNDED, circumstance])
        assert program.wait() == CODES[circumstance], program.stderr
        assert contents(tmp_path / name) == expected
        find_line([program.last_line], LINES[circumstance])
        assert "Traceback" not in program.stderr
        assert "Exception ignored" not in program.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_program_is_refused_and_the_first_is_not_disturbed(small_programs, tmp_path, name, exhaustive):
    skip_unless_tried(name, exhaustive, ["export"])
    expected, _ = small_programs.undisturbed(name, tmp_path / "undisturbed")
    folder, writing = tmp_path / "shared", Moment("replacing", 0, 0)  # it has claimed its files by then
    first = small_programs.start(name, folder, at=writing, number=signal.SIGSTOP).stopped()
    second = small_programs.start(name, folder)
    assert second.wait() == 2, second.stderr
    first.send(signal.SIGCONT)
    find_line(second.last_line, "another program")
    assert first.wait() == 0, first.stderr
    assert contents(folder) == expected


def test_two_evaluations_share_a_reference_and_a_killed_one_does_not_hold_it(small_programs, tmp_path):
    expected, _ = small_programs.undisturbed("evaluate images", tmp_path / "undisturbed")
    at, folder = Moment("FeatureStore.add", 3, 0), tmp_path / "a"
    first = small_programs.start("evaluate images", folder, at=at, number=signal.SIGSTOP).stopped()
    second = small_programs.start("evaluate images", folder, more=["--out", "second.json"])
    while "another program" not in second.stderr:
        assert not (second.folder / "returncode").exists(), second.stderr
        time.sleep(0.02)
    first.send(signal.SIGKILL)
    assert second.wait() == 0, second.stderr
    assert contents(folder)["second.json"] == expected["report.json"]
    assert not [path for path in contents(folder) if Path(path).suffix == ".partial"]


def test_a_system_without_posix_trains_samples_and_evaluates(programs, tmp_path):
    """As on Windows: no module `resource`, no SIGUSR1 and no SIGUSR2."""
    fit = ["train.py", "fit", "--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=2"]
    ckpt = ["--ckpt", "runs/digits/version_0/checkpoints/last.ckpt", "--num", "80", "--steps", "2"]
    evaluate = ["evaluate.py", "generation", *ckpt, "--reference", "digits:train", *DIGITS]
    callbacks = '--trainer.callbacks=[{"class_path": "uvit_decay.callbacks.LastCheckpoint"}]'
    for command in ([*fit, callbacks], ["sample.py", *ckpt, "--out", "samples.npz"], evaluate):
        program = programs.start(SURROUNDED, "without-posix,quick", *command, cwd=tmp_path)
        assert program.wait() == 0, program.stderr
