"""Disks that are read-only, or full at any write of any program: one line, nothing lost, the next start goes well."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from disks import PAGE, PLENTY, check_line
from small_programs import COMMANDS, contents, skip_unless_tried

MANIFEST = "latents/manifest.json"  # which says that the latents are not complete
MOST = 10  # tries of each program
RESUMED = ("latents", "samples", "cache")  # folders of parts, which must not exist before


def draw_pages(expected: dict[str, bytes], count: int) -> list[int]:
    """Return numbers of pages that are free before a start, fewer than all files need."""
    pages = sum(-(-len(data) // PAGE) for data in expected.values())
    return random.Random(pages).sample(range(pages), min(count, pages))


def with_old_files(folder: Path, expected: dict[str, bytes]) -> Path:
    """Return a folder in which each file that a program replaces exists."""
    for name in expected:
        if name.partition("/")[0] not in RESUMED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"old")
    folder.mkdir(exist_ok=True)
    return folder


def check_files(folder: Path, expected: dict[str, bytes]) -> None:
    """Each file is old, new or not there, and nothing is left beside them but parts of features."""
    for name, data in contents(folder).items():
        assert name == MANIFEST or data in (b"old", expected.get(name, data)), name
        assert name in expected or name.startswith(("cache/", "report.features")), name
        assert not name.endswith(".partial"), name
    old = {name for name in expected if name.partition("/")[0] not in RESUMED}
    assert old <= contents(folder).keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_is_read_only_or_full_loses_nothing(small_programs, disk, tmp_path, name, exhaustive):
    skip_unless_tried(name, exhaustive)
    expected, _ = small_programs.undisturbed(name, tmp_path / "undisturbed")
    for pages in draw_pages(expected, MOST if exhaustive else 1):
        folder = with_old_files(disk.folder / str(pages), expected)
        before = contents(folder)
        disk.forbid()
        forbidden = small_programs.start(name, folder)
        check_line(forbidden, "Read-only file system")
        assert contents(folder) == before
        disk.leave(pages)
        full = small_programs.start(name, folder)
        code = full.wait()
        disk.leave(PLENTY)
        if code == 0 and pages:
            continue  # there was enough space
        check_line(full, "No space left on device")
        check_files(folder, expected)
        again = small_programs.start(name, folder)
        assert again.wait() == 0, again.stderr
        assert contents(folder) == expected
