"""--ckpt_path last and auto: the command finds the newest whole checkpoint of the experiment before it trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeGuard

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.checkpoint import read_training_checkpoint
from uvit_decay.checkpoint.newest import newest_settings, newest_whole, run_folders
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.settings import Settings, same_run

LAST, AUTO = "last", "auto"
NAMES = (LAST, AUTO)  # what a path may be in place of a file


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


def settings_before(
    path: str, now: Settings, allowed: Sequence[str], loggers: Iterable[object], root: str | Path
) -> Settings | None:
    """Return the settings in the checkpoint that `path`, a file or one of NAMES, means; None if there is none."""
    if path in NAMES:
        return newest_settings(runs_of(loggers, root)[1], partial(may_resume, path, now, allowed))
    return read_training_checkpoint(Path(path), whole=False).get("settings") or {}


def may_resume(name: str, now: Settings, allowed: Sequence[str], before: Settings) -> bool:
    """Return whether a run of the settings `now` may resume from a checkpoint of those `before`; `last` takes any."""
    return name == LAST or same_run(before, now, allowed)


def newest(
    name: str, now: Settings, allowed: Sequence[str], loggers: Iterable[object], root: str | Path
) -> Path | None:
    """Return the checkpoint that `last` or `auto` means, and say which it is; None if `auto` finds none."""
    where, runs = runs_of(loggers, root)
    try:
        found = newest_whole(runs, partial(may_resume, name, now, allowed))
    except UserError as error:
        raise UserError(f"--ckpt_path {name}: {error}") from error
    if found is None and name == LAST:
        reason = f"there is no checkpoint of a run in {where}: leave it out to start a new run"
        raise UserError(f"--ckpt_path last: {reason}")
    if found is None:
        said = f"--ckpt_path {name}: a new run starts: there is no checkpoint of these settings in {where}"
    else:
        said = f"--ckpt_path {name}: resuming from {found.path} (step {found.step})"
        if found.damaged:
            said = f"warning: {'; '.join(found.damaged)}: {said}"
    rank_zero_info(said)
    return found.path if found else None
