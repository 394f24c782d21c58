"""The checkpoints of a run: their names and rotation, and the newest whole one, which --ckpt_path last and auto mean.

The newest is that of the highest number of a run, then of the highest step; clocks play no part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.checkpoint.io import check_ours, open_training_checkpoint
from uvit_decay.history import CHECKPOINTS
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import writing
from uvit_decay.runtime.tensor_files import TorchFile
from uvit_decay.runtime.validation import typed
from uvit_decay.tasks.resumption.settings import Settings, same_run

AUTO = "auto"
NAMES = ("last", AUTO)  # what --ckpt_path may be in place of a file
NEXT, LAST, PREVIOUS = "next.ckpt", "last.ckpt", "previous.ckpt"
MOST_OPEN = 64  # files
RUN = re.compile(r"version_(\d+)")


def makes_folders(logger: object) -> TypeGuard[TensorBoardLogger | CSVLogger]:
    """Return whether a logger makes a folder for each run; that of others is not one of their own (W&B's is ".")."""
    return isinstance(logger, TensorBoardLogger | CSVLogger)


def runs_of(loggers: Iterable[object], root: str | Path) -> tuple[Path, list[Path]]:
    """Return the folder of an experiment and its run folders, the newest first.

    Without a logger that makes run folders both are `root`.
    """
    for logger in loggers:
        if makes_folders(logger):
            return Path(logger.root_dir), run_folders(Path(logger.root_dir))
    return Path(root), [Path(root)]


def run_folders(experiment: Path) -> list[Path]:
    """Return the folders version_N of an experiment, the highest N first."""
    numbers = {folder: RUN.fullmatch(folder.name) for folder in experiment.glob("version_*") if folder.is_dir()}
    runs = [(int(number[1]), folder) for folder, number in numbers.items() if number]
    return [folder for _, folder in sorted(runs, reverse=True)]


class Checkpoints:
    """Training checkpoints that a run may resume from; each file is opened and unpickled once, and kept until `close`.

    At most MOST_OPEN files are open: of more, the first ones are opened again if they are read again.
    """

    def __init__(self) -> None:
        self._files: dict[Path, TorchFile] = {}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, path: Path, whole: bool = False) -> dict[str, Any]:
        """Return the contents of a checkpoint of this project, whose tensors are memory-mapped.

        Args:
            path: the file.
            whole: compare the tensors with their checksums, too, which reads the whole file.

        Raises:
            UserError: a file that is missing, damaged, or of another program.
        """
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = open_training_checkpoint(path)
            if len(self._files) > MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
        contents = file.read(whole)
        check_ours(contents, path)
        return contents

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def settings_before(
    path: str,
    now: Settings,
    allowed: Sequence[str],
    loggers: Iterable[object],
    root: str | Path,
    checkpoints: Checkpoints,
) -> Settings | None:
    """Return the settings in the checkpoint that `path`, a file or one of NAMES, means; None if there is none."""
    if path in NAMES:
        fits = partial(may_resume, path, now, allowed)
        found = _fitting(runs_of(loggers, root)[1], fits, checkpoints, [])
        return next((settings for _, _, settings in found), None)
    return checkpoints.read(Path(path)).get("settings") or {}


def may_resume(name: str, now: Settings, allowed: Sequence[str], before: Settings) -> bool:
    """Return whether a run of the settings `now` may resume from a checkpoint of those `before`; `last` takes any."""
    return name != AUTO or same_run(before, now, allowed)


def newest(
    name: str,
    now: Settings,
    allowed: Sequence[str],
    loggers: Iterable[object],
    root: str | Path,
    checkpoints: Checkpoints,
) -> Path | None:
    """Return the checkpoint that `last` or `auto` means, and say which it is; None if `auto` finds none.

    All its bytes are compared with their checksums.

    Raises:
        UserError: `last` finds none, or there are checkpoints, but those that fit are all damaged.
    """
    where, runs = runs_of(loggers, root)
    damaged: list[str] = []
    for path, step, _ in _fitting(runs, partial(may_resume, name, now, allowed), checkpoints, damaged):
        try:
            checkpoints.read(path, whole=True)
        except UserError as error:
            damaged.append(str(error))
        else:
            said = f"--ckpt_path {name}: resuming from {path} (step {step})"
            rank_zero_info(f"warning: {'; '.join(damaged)}: {said}" if damaged else said)
            return path
    if damaged:
        raise UserError(f"--ckpt_path {name}: no checkpoint of this experiment is whole: {'; '.join(damaged)}")
    if name != AUTO:
        reason = f"there is no checkpoint of a run in {where}: leave it out to start a new run"
        raise UserError(f"--ckpt_path {name}: {reason}")
    rank_zero_info(f"--ckpt_path {name}: a new run starts: there is no checkpoint of these settings in {where}")
    return None


def _fitting(
    runs: Iterable[Path], fits: Callable[[Settings], bool], checkpoints: Checkpoints, damaged: list[str]
) -> Iterator[tuple[Path, int, Settings]]:
    """Yield path, step and settings of checkpoints that fit, the newest first; add to `damaged` what is unreadable."""
    for run in runs:
        found = []
        # The likely newest come last, so that they stay open however many there are.
        for path in sorted((run / CHECKPOINTS).glob("*.ckpt"), key=lambda path: path.name in (NEXT, LAST, PREVIOUS)):
            try:
                contents = checkpoints.read(path)
                step = typed(int, contents.get("global_step"), f"global_step of {path}")
                settings = typed(dict[str, object], contents.get("settings") or {}, f"{path}: settings")
                found.append((path, step, settings))
            except UserError as error:
                damaged.append(str(error))
        found.sort(key=lambda entry: (-entry[1], entry[0].name != LAST))
        yield from (entry for entry in found if fits(entry[2]))


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
