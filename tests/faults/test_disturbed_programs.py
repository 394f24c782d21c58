"""Files of a running program that is disturbed: by a second program, or a deleted folder."""

from __future__ import annotations

import shutil
import signal

import pytest
from programs import Moment
from refusals import find_line
from small_programs import COMMANDS, WORK, contents, draw_moments, skip_unless_tried

WRITING = Moment("replacing", 0, 0)  # every program has claimed its files by then
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_program_is_refused_and_the_first_is_not_disturbed(small_programs, tmp_path, name, exhaustive):
    skip_unless_tried(name, exhaustive, ["export"])
    expected, _ = small_programs.undisturbed(name, tmp_path / "undisturbed")
    folder = tmp_path / "shared"
    first = small_programs.start(name, folder, at=WRITING, number=signal.SIGSTOP).stopped()
    second = small_programs.start(name, folder)
    assert second.wait() == 2, second.stderr
    first.send(signal.SIGCONT)
    find_line(second.last_line, "another program")
    assert first.wait() == 0, first.stderr
    assert contents(folder) == expected


EACH = 3  # moments of each program when all are tried


def choose_moments(calls: dict[str, list[int]], name: str, exhaustive: bool) -> list[Moment]:
    """Return moments at which the folder vanishes: one in the work of a program, or many also where it writes."""
    work = {function: runs for function, runs in calls.items() if exhaustive or function in (*WORK, "FeatureStore.add")}
    work = work if any(work.values()) else {"replacing": calls["replacing"]}
    return draw_moments(work, EACH if exhaustive else 1, len(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_vanishes_is_one_line(small_programs, tmp_path, name, exhaustive):
    skip_unless_tried(name, exhaustive)
    expected, calls = small_programs.undisturbed(name, tmp_path / "undisturbed")
    for moment in choose_moments(calls, name, exhaustive):
        folder = tmp_path / f"at {moment}"
        program = small_programs.start(name, folder, at=moment, number=signal.SIGSTOP).stopped()
        if program.has_ended:
            continue
        shutil.rmtree(folder)
        program.send(signal.SIGCONT)
        program.wait()
        again = small_programs.start(name, folder)
        assert again.wait() == 0, again.stderr
        assert contents(folder) == expected
        if program.wait() == 0:
            continue  # the folder vanished after the last write
        assert program.wait() == 2, program.stderr
        assert program.last_line.startswith("error: "), program.stderr
        assert "Traceback" not in program.stderr
