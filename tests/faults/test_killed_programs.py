"""Programs that are killed or interrupted at any moment: the same command, again, ends with the same files."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from programs import Moment
from small_programs import COMMANDS, contents, draw_moments, skip_unless_tried

SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: -15, signal.SIGINT: 130}  # exit codes
PROGRAMS = [name for name in COMMANDS if name not in ("features", "compare")]
PARTS = ("latents/shard-*", "samples/*.png", "report.features/*", "cache/uvit_decay/features/*/*.safetensors")
EACH = 9  # moments of each program when all are tried


def parts(folder: Path) -> dict[Path, int]:
    """Return the finished parts of the work, and when they were written."""
    return {path: path.stat().st_mtime_ns for pattern in PARTS for path in folder.glob(pattern)}


def chosen(calls: dict[str, list[int]], name: str, exhaustive: bool) -> list[tuple[Moment, int]]:
    """Moments of a program and signals: one of each drawn, or all."""
    first = PROGRAMS.index(name)
    all_of_them = [
        (moment, [*SIGNALS][(first + i) % 3]) for i, moment in enumerate(draw_moments(calls, EACH, seed=first))
    ]
    return all_of_them if exhaustive else random.Random(first).sample(all_of_them, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_struck_ends_with_the_same_files_when_it_is_started_again(small_programs, tmp_path, name, exhaustive):
    skip_unless_tried(name, exhaustive)
    expected, calls = small_programs.undisturbed(name, tmp_path / "undisturbed")
    for i, (moment, number) in enumerate(chosen(calls, name, exhaustive)):
        folder = tmp_path / str(i)
        struck = small_programs.start(name, folder, at=moment, number=number)
        if struck.wait() == 0:  # imports took fewer calls than before
            continue
        assert struck.wait() == SIGNALS[number], struck.stderr
        if number == signal.SIGINT:
            assert struck.last_line == "interrupted"
            assert "Traceback" not in struck.stderr
        there = parts(folder)
        again = small_programs.start(name, folder, watched=["FeatureStore.add"])
        assert again.wait() == 0, f"{moment}: {again.stderr}"
        assert contents(folder) == expected, str(moment)
        after = parts(folder)  # what was finished before was not made again
        assert all(after.get(path, when) == when for path, when in there.items())
        stored = [path for path in there if path.suffix == ".safetensors" and "shard" not in path.name]
        assert len(again.calls["FeatureStore.add"]) == len(calls["FeatureStore.add"]) - len(stored)
        if pictures := [path for path in there if path.suffix == ".png"]:
            assert f"{len(pictures)} were there" in again.stdout
