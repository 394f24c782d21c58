"""The newest checkpoints of a run: last.ckpt, the one before as previous.ckpt, then previous_2.ckpt and so on.

A checkpoint is written as next.ckpt. When that is whole, files are renamed, from the oldest to the newest. A kill
between two renames leaves a gap in the names and loses nothing: a file is only given up for the next newer one.
"""

from __future__ import annotations

import re
from pathlib import Path

from uvit_decay.runtime.files import writing

NEXT, LAST, PREVIOUS = "next.ckpt", "last.ckpt", "previous.ckpt"
OLDER = re.compile(r"previous_(\d+)\.ckpt")
NOWHERE = 2**62


def names(keep: int) -> list[str]:
    """Return the names of the next checkpoint and of the `keep` newest ones, from the newest to the oldest."""
    return [NEXT, LAST, PREVIOUS, *(f"previous_{i}.ckpt" for i in range(2, keep))][: keep + 1]


def place(name: str) -> int:
    """Return the index of a name in `names`, of any length; a large number for other names."""
    if name in (NEXT, LAST, PREVIOUS):
        return (NEXT, LAST, PREVIOUS).index(name)
    older = OLDER.fullmatch(name)
    return 1 + int(older[1]) if older else NOWHERE


def rotate(folder: Path, keep: int) -> None:
    """Rename next.ckpt to last.ckpt, and the `keep` - 1 newest before it each to the name of the one before."""
    files = [folder / name for name in names(keep)]
    gap = next((i for i, file in enumerate(files) if i and not file.exists()), keep)  # older files than that may stay
    with writing(folder):
        for i in range(gap, 0, -1):
            files[i - 1].replace(files[i])
