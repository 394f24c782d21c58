"""All loggers of a run: pictures and numbers for them, failures of one of them, and their records in a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image

from uvit_decay.runs.folder import makes_folders
from uvit_decay.runs.history import NUMBERED
from uvit_decay.runs.lightning_private import hide_later_steps, keep_rows, set_record
from uvit_decay.runs.log import RunLogger
from uvit_decay.terminal.errors import UserError, one_line

# Methods that Lightning calls during a run and at its end.
GUARDED = ("log_metrics", "save", "finalize")
_WARNED: WeakSet[Logger] = WeakSet()  # loggers whose failure has been reported


@contextmanager
def tolerate_failure(logger: Logger) -> Iterator[None]:
    """Turn an exception of a logger in the body into one warning for each logger.

    The files of the run folder are the record of a run: if they cannot be written, the error is raised.
    """
    try:
        yield
    except Exception as error:
        if makes_folders(logger) and isinstance(error, UserError | OSError):
            raise
        if logger not in _WARNED:
            _WARNED.add(logger)
            what = f"{type(error).__name__}: {one_line(error)}"
            rank_zero_info(f"warning: {type(logger).__name__} failed and is without some results of this run: {what}")


def guard(logger: Logger) -> None:
    """Let the GUARDED methods of a logger warn once instead of ending the run, also where Lightning calls them.

    Loggers that write the run folder are left as they are: their files are the record of the run.
    """
    if makes_folders(logger):
        return
    for name in GUARDED:
        setattr(logger, name, _tolerant(logger, getattr(logger, name)))


def _tolerant(logger: Logger, method: Callable[..., None]) -> Callable[..., None]:
    """Return a method of a logger that warns where `method` raises."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        with tolerate_failure(logger):
            method(*args, **kwargs)

    return call


def log_numbers(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Send numbers of the current step to every logger, and write them; for rank 0 alone."""
    for logger in trainer.loggers:
        with tolerate_failure(logger):
            logger.log_metrics(dict(values), trainer.global_step)
            logger.save()


def log_picture(trainer: Trainer, path: Path) -> None:
    """Send the picture of a file to every logger that takes images, under its name; for rank 0 alone.

    They are W&B's and others with `log_image`, MLflow's, and TensorBoard's.
    """
    picture = Image.open(path).convert("RGB")
    for logger in trainer.loggers:
        with tolerate_failure(logger):
            _send_picture(logger, path.stem, picture, trainer.global_step)


def _send_picture(logger: Logger, name: str, picture: Image.Image, step: int) -> None:
    """Send a picture to a logger if it takes images."""
    if isinstance(logger, MLFlowLogger):
        logger.experiment.log_image(logger.run_id, picture, key=name, step=step)
    elif log_image := getattr(logger, "log_image", None):
        log_image(key=name, images=[picture], step=step)
    elif add_image := getattr(logger.experiment, "add_image", None):
        add_image(name, np.asarray(picture), step, dataformats="HWC")


def list_versions(loggers: Iterable[Logger]) -> dict[str, int | str]:
    """Return the names under which loggers keep a run, by class: versions of folders, the ID of W&B.

    The second logger of a class has a number behind its name. Other loggers are left out. Only rank 0 may call this.
    """
    versions = {}
    for name, logger in _name(loggers):
        if makes_folders(logger) or isinstance(logger, WandbLogger):
            versions[name] = logger.version
    return versions


def continue_records(loggers: Sequence[Logger], run: Path, versions: Mapping[str, Any], step: int) -> None:
    """Let loggers go on where an earlier launch of the run has logged; all ranks must call this.

    A version or an ID that the user gives to a logger counts instead. TensorBoard hides what was logged after `step`.

    Args:
        loggers: the loggers, which have not logged anything yet. The first one that makes folders has the run folder.
        run: the run folder.
        versions: see `list_versions`. A logger that is not in it begins a new record.
        step: the optimizer step from which the run resumes.
    """
    first = next(logger for logger in loggers if makes_folders(logger))
    numbered = NUMBERED.fullmatch(run.name)
    version_of_run = int(numbered[1]) if numbered else run.name
    for name, logger in _name(loggers):
        version = version_of_run if logger is first else versions.get(name)
        if version is None:
            continue
        if isinstance(logger, RunLogger):
            logger.go_on(version)
        else:
            set_record(logger, version)
        # What the earlier launch has logged after the checkpoint will be logged again.
        if isinstance(logger, TensorBoardLogger):
            hide_later_steps(logger, step)
        elif isinstance(logger, CSVLogger):
            keep_rows(logger)


def _name(loggers: Iterable[Logger]) -> Iterator[tuple[str, Logger]]:
    """Yield each logger with its name in `list_versions`."""
    seen: dict[str, int] = {}
    for logger in loggers:
        kind = type(logger).__name__
        seen[kind] = seen.get(kind, 0) + 1
        yield kind if seen[kind] == 1 else f"{kind}{seen[kind]}", logger
