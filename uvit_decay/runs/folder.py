"""The run folder, runs/<experiment>/version_N: where it is, and who may write there."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeGuard

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.files.writing import Claimed, claim_paths, remove_remains
from uvit_decay.runs.history import CHECKPOINTS, CONFIG, HISTORIES, METRICS, list_run_folders, run_of
from uvit_decay.runs.lightning_private import has_version
from uvit_decay.terminal.errors import UserError

LAUNCHES = "launches.jsonl"
RUN_FILES = (CONFIG, LAUNCHES, METRICS, *HISTORIES)  # a run may begin with them; each marks a run folder
WAIT = 60.0  # seconds for which a run waits for the program that still writes its folder


def makes_folders(logger: object) -> TypeGuard[TensorBoardLogger | CSVLogger]:
    """Return whether a logger makes a folder for each run. Other loggers name a shared folder (W&B names ".")."""
    return isinstance(logger, TensorBoardLogger | CSVLogger)


def find_runs(loggers: Iterable[object], root: str | Path) -> tuple[Path, list[Path]]:
    """Return the folder of an experiment and its run folders, the newest first.

    Without a logger that makes run folders both are `root`.
    """
    for logger in loggers:
        if makes_folders(logger):
            experiment = Path(logger.root_dir)
            return experiment, list_run_folders(experiment)
    return Path(root), [Path(root)]


def run_folder(trainer: Trainer) -> Path:
    """Return the run folder, the same on all ranks, and create it if it is missing; all ranks must call this.

    It is the folder of the first logger that makes one, otherwise the trainer's default_root_dir.
    """
    ours = trainer.default_root_dir
    for logger in trainer.loggers:
        if makes_folders(logger):
            ours = logger.log_dir
            break
    folder = Path(trainer.strategy.broadcast(ours))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_own_run(checkpoint: Path, trainer: Trainer) -> Path | None:
    """Return the run folder of a checkpoint if it is a folder of this experiment, otherwise None.

    If the user gives the logger a version, it must be this one.
    """
    run = run_of(checkpoint)
    logger = next(filter(makes_folders, trainer.loggers), None)
    if run is None or logger is None:
        return None
    if has_version(logger):
        same = run.resolve() == Path(logger.log_dir).resolve()
    else:
        same = run.parent.resolve() == Path(logger.root_dir).resolve()
    return run if same else None


def find_previous_run(trainer: Trainer) -> Path | None:
    """Return the folder of the checkpoint from which a run resumes; None for a new run, or if it is not known."""
    if not trainer.ckpt_path:
        return None
    return run_of(trainer.ckpt_path)


def goes_on(trainer: Trainer) -> bool:
    """Return whether a run resumes in the folder of its checkpoint; all ranks must call this."""
    folder = run_folder(trainer)
    previous = find_previous_run(trainer)
    return previous is not None and previous.resolve() == folder.resolve()


def claim_run(run: Path, claims: ExitStack) -> bool:
    """Lock a run folder until `claims` is closed, and remove partial files of killed programs.

    Returns:
        whether this had to wait for another program, which may have saved a newer checkpoint meanwhile. After a minute
        it is an error.
    """
    waited = False
    try:
        claims.enter_context(claim_paths(run))
    except Claimed:
        waited = True
        rank_zero_info(f"another program is writing {run}: waiting up to {WAIT:g} s for its end")
        try:
            claims.enter_context(claim_paths(run, wait=WAIT))
        except Claimed as error:
            advice = "wait for its end, or leave `ckpt_path` out to start a new run"
            raise UserError(f"another program trains in {run}: {advice}") from error
    _remove_partial_files(run)
    return waited


def remove_partial_checkpoints(experiment: Path) -> None:
    """Remove the partial files of the runs that a kill ended in a checkpoint, perhaps in their first one."""
    for partial in list(experiment.glob(f"version_*/{CHECKPOINTS}/.*.partial")):
        run = partial.parents[1]
        with suppress(Claimed), claim_paths(run):  # otherwise a program is writing it
            _remove_partial_files(run)


def _remove_partial_files(run: Path) -> None:
    """Remove the partial files in a claimed run folder."""
    for folder in (run, *filter(Path.is_dir, run.iterdir())):  # checkpoints, pictures
        remove_remains(folder)
