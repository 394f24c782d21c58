"""The harness itself: programs are struck where they are told to be, and end with their launcher."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from programs import Launcher, Moment


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_is_struck_at_its_moment(programs, tmp_path, number):
    program = programs.start("evaluate.py", "--help", cwd=tmp_path, at=Moment("run", 0, 0), number=number)
    assert program.wait() == {signal.SIGKILL: -9, signal.SIGTERM: -15}[number]
    assert program.stdout == ""


@pytest.mark.slow
def test_a_launcher_ends_what_it_has_started(tmp_path, exhaustive):
    if not exhaustive:
        pytest.skip("with --exhaustive")
    launcher = Launcher(tmp_path)
    program = launcher.start("train.py", "fit", cwd=tmp_path)
    program.send(signal.SIGSTOP)
    launcher.end()
    end = time.monotonic() + 30
    state = Path(f"/proc/{program.pid}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)
