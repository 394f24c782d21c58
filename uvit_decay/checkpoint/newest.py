"""The newest whole checkpoint of an experiment: by the number of the run, then by the step; clocks play no part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvit_decay.checkpoint.io import read_training_checkpoint
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import writing
from uvit_decay.runtime.validation import typed

CHECKPOINTS = "checkpoints"  # folder in a run folder
RUN = re.compile(r"version_(\d+)")

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Newest:
    """A checkpoint that is whole, its step, and what is wrong with others, each a line that names its file."""

    path: Path
    step: int
    damaged: tuple[str, ...]


def run_of(checkpoint: str | Path) -> Path | None:
    """Return the folder of the run that wrote a checkpoint, None if it is not known.

    LastCheckpoint writes to `checkpoints` in the run folder.
    """
    folder = Path(checkpoint).parent
    return folder.parent if folder.name == CHECKPOINTS else None


def run_folders(experiment: Path) -> list[Path]:
    """Return the folders version_N of an experiment, the highest N first."""
    numbers = {folder: RUN.fullmatch(folder.name) for folder in experiment.glob("version_*") if folder.is_dir()}
    runs = [(int(number[1]), folder) for folder, number in numbers.items() if number]
    return [folder for _, folder in sorted(runs, reverse=True)]


def newest_whole(runs: Iterable[Path], fits: Callable[[Settings], bool]) -> Newest | None:
    """Return the newest checkpoint in the first of these run folders that has a whole one; None without checkpoints.

    Args:
        runs: run folders, the newest first.
        fits: whether a run may be resumed from a checkpoint of these settings; others are left out.

    Raises:
        UserError: there are checkpoints, but those that fit are all damaged.
    """
    damaged: list[str] = []
    for path, step, _ in _fitting(runs, fits, damaged):
        try:
            read_training_checkpoint(path)  # all of it, compared with its checksums
            return Newest(path, step, tuple(damaged))
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        raise UserError(f"no checkpoint of this experiment is whole: {'; '.join(damaged)}")
    return None


def newest_settings(runs: Iterable[Path], fits: Callable[[Settings], bool]) -> Settings | None:
    """Return the settings of the checkpoint that `newest_whole` would try first, None if there is none."""
    return next((settings for _, _, settings in _fitting(runs, fits, [])), None)


def _fitting(
    runs: Iterable[Path], fits: Callable[[Settings], bool], damaged: list[str]
) -> Iterator[tuple[Path, int, Settings]]:
    """Yield path, step and settings of checkpoints that fit, the newest first; add to `damaged` what is unreadable."""
    for run in runs:
        found = []
        for path in (run / CHECKPOINTS).glob("*.ckpt"):
            try:
                contents = read_training_checkpoint(path, whole=False)
                step = typed(int, contents.get("global_step"), f"global_step of {path}")
                settings = typed(dict[str, object], contents.get("settings") or {}, f"{path}: settings")
                found.append((path, step, settings))
            except UserError as error:
                damaged.append(str(error))
        found.sort(key=lambda entry: (-entry[1], entry[0].name != LAST))
        yield from (entry for entry in found if fits(entry[2]))


NEXT, LAST, PREVIOUS = "next.ckpt", "last.ckpt", "previous.ckpt"


def names(keep: int) -> list[str]:
    """Return the names of the next checkpoint and of the `keep` newest ones, from the newest to the oldest."""
    return [NEXT, LAST, PREVIOUS, *(f"previous_{i}.ckpt" for i in range(2, keep))][: keep + 1]


def rotate(folder: Path, keep: int) -> None:
    """Rename next.ckpt to last.ckpt, and the `keep` - 1 newest before it each to the name of the one before."""
    files = [folder / name for name in names(keep)]
    gap = next((i for i, file in enumerate(files) if i and not file.exists()), keep)  # older files than that may stay
    with writing(folder):
        for i in range(gap, 0, -1):
            files[i - 1].replace(files[i])


def finish_rotation(checkpoint: Path) -> None:
    """Rename a next.ckpt that a kill kept from becoming last.ckpt; as many older ones are kept as there are."""
    if checkpoint.name == NEXT:
        rotate(checkpoint.parent, 1 + len(list(checkpoint.parent.glob("previous*.ckpt"))))
