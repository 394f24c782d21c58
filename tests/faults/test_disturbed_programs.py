"""Files of a running program that is disturbed: by a second program, a deleted folder, or a full disk."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import PLENTY, Disk, check_line
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


def lock_folder(folder: Path, how: str = "+i") -> None:
    """Let nobody, not even root, make or remove files in a folder and those below, or allow it again."""
    folders = [path for path in (folder, *folder.rglob("*")) if path.is_dir()]
    subprocess.run(["chattr", how, *folders], check=True)


FAULTS: dict[str, Callable[[Disk, Path], None]] = {
    "folder vanishes": lambda disk, folder: shutil.rmtree(folder),
    "disk fills": lambda disk, folder: disk.leave(0),
    "folder is closed": lambda disk, folder: lock_folder(folder),
}
EACH = 3  # moments of each program and fault when all are tried


def chosen(calls: dict[str, list[int]], name: str, fault: str, exhaustive: bool) -> list[Moment]:
    """Moments at which a fault comes: of each program one in its work, or many also where it writes."""
    work = {function: runs for function, runs in calls.items() if exhaustive or function in (*WORK, "FeatureStore.add")}
    work = work if any(work.values()) else {"replacing": calls["replacing"]}
    return draw_moments(work, EACH if exhaustive else 1, len(name + fault))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_vanishes_and_a_disk_that_fills_are_one_line(small_programs, disk, tmp_path, name, exhaustive):
    skip_unless_tried(name, exhaustive)
    expected, calls = small_programs.undisturbed(name, tmp_path / "undisturbed")
    chances = [(fault, moment) for fault in FAULTS for moment in chosen(calls, name, fault, exhaustive)]
    for fault, moment in chances if exhaustive else random.Random(name).sample(chances, 1):
        folder = disk.folder / f"{fault} at {moment}"
        program = small_programs.start(name, folder, at=moment, number=signal.SIGSTOP).stopped()
        if program.has_ended:
            continue
        FAULTS[fault](disk, folder)
        program.send(signal.SIGCONT)
        program.wait()
        disk.leave(PLENTY)
        if folder.exists():
            lock_folder(folder, "-i")
        again = small_programs.start(name, folder)
        assert again.wait() == 0, again.stderr
        assert contents(folder) == expected
        if program.wait() == 0:
            continue  # the fault came after the last write
        if fault == "disk fills":
            check_line(program, "No space left on device")
        assert program.wait() == 2, program.stderr
        assert program.last_line.startswith("error: "), program.stderr
        assert "Traceback" not in program.stderr
