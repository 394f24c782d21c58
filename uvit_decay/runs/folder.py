"""The run folder, runs/<experiment>/version_N: where it is, and which files mark it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from uvit_decay.runs import history
from uvit_decay.runs.history import GENERATION, METRICS, PROBES, run_of

CONFIG = "config.yaml"
RUN_FILES = (CONFIG, METRICS, PROBES, GENERATION)  # a run may begin with them; each marks a run folder
RUN = re.compile(r"version_(\d+)")


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


def list_run_folders(experiment: Path) -> list[Path]:
    """Return the folders version_N of an experiment, the highest N first."""
    runs = []
    for folder in experiment.glob("version_*"):
        match = RUN.fullmatch(folder.name)
        if match and folder.is_dir():
            runs.append((int(match[1]), folder))
    runs.sort(reverse=True)
    return [folder for _, folder in runs]


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


def find_previous_run(trainer: Trainer) -> Path | None:
    """Return the folder of the run that this run resumes; None for a new run, or if the folder is not known."""
    if not trainer.ckpt_path:
        return None
    return run_of(trainer.ckpt_path)


def continue_history(trainer: Trainer, name: str) -> None:
    """Copy the history `name` of the run that this run resumes, up to the present step; all ranks must call this."""
    previous = find_previous_run(trainer)
    if previous is None or trainer.fast_dev_run:
        return
    folder = run_folder(trainer)
    if trainer.is_global_zero:
        history.copy_until(trainer.global_step, previous / name, folder / name)
