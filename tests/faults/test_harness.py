"""The harness itself: programs are struck where they are told to be, and equal programs run equally."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from programs import Launcher, Moment, moments


@pytest.mark.slow
def test_a_program_runs_to_its_end_and_counts_its_calls(programs, tmp_path):
    program = programs.run("evaluate.py", "--help", cwd=tmp_path, watched=["run"])
    assert program.wait() == 0
    assert "generation" in program.stdout
    assert len(program.calls["run"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_is_struck_at_its_moment(programs, tmp_path, number):
    program = programs.run("evaluate.py", "--help", cwd=tmp_path, at=Moment("run", 0, 0), number=number)
    assert program.wait() == {signal.SIGKILL: -9, signal.SIGTERM: -15}[number]
    assert program.stdout == ""


def test_moments_are_drawn_in_each_function_that_ran():
    drawn = moments({"a": [5, 1], "b": [3], "never": []}, 6, seed=0)
    assert [moment.function for moment in drawn] == ["a", "b", "a", "b", "a", "b"]
    assert drawn == moments({"a": [5, 1], "b": [3], "never": []}, 6, seed=0)
    assert all(moment.call < {"a": [5, 1], "b": [3]}[moment.function][moment.entry] for moment in drawn)


@pytest.mark.slow
def test_a_launcher_ends_what_it_has_started(tmp_path):
    launcher = Launcher(tmp_path)
    program = launcher.start("train.py", "fit", cwd=tmp_path)
    program.send(signal.SIGSTOP)
    launcher.end()
    end = time.monotonic() + 30
    state = Path(f"/proc/{program.pid}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)
