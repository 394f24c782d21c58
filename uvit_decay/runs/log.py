"""The loggers of the run folder: TensorBoard events, metrics.csv and config.yaml."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.runs.folder import CONFIG, RUN_FILES, run_folder
from uvit_decay.runs.history import CHECKPOINTS, METRICS, read_rows
from uvit_decay.runs.loggers import guard
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, replacing, writing
from uvit_decay.runtime.typed import check_types


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml to the run folder, which must not hold another run, and guards the loggers.

    A logger that fails during the run is reported once and does not end the run, see `guard`.
    """

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            guard(logger)
        self._folder = run_folder(trainer)
        occupied = False
        if trainer.is_global_zero:
            occupied = any((self._folder / name).exists() for name in (CHECKPOINTS, *RUN_FILES))
        if trainer.strategy.broadcast(occupied) and not self.already_saved:
            raise UserError(f"{self._folder} already holds a run: set another version or folder of the logger")
        super().setup(trainer, task, stage)

    def save_config(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(task.settings)
        self.parser.save(self.config, str(self._folder / CONFIG), skip_unset=False, overwrite=True)


@check_types
class RunLogger(TensorBoardLogger):
    """Logger of TensorBoard events and metrics.csv in one folder; two Lightning loggers would choose two versions.

    Args:
        experiment: name of the experiment, and of its folder below `save_dir`.
        save_dir: folder of all experiments.
        version: number or name of the run; null takes the next free number.
    """

    def __init__(self, experiment: str, save_dir: str | Path = "runs", version: int | str | None = None) -> None:
        check_writable(Path(save_dir) / experiment, folder=True)
        # CSVLogger warns that the folder exists, which TensorBoard has just made.
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
        super().__init__(save_dir, name=experiment, version=version, default_hp_metric=False)
        self._owns_folder = False  # whether this logger created its folder
        if version is not None:
            folder = Path(self.log_dir)
            if (folder / METRICS).exists():  # CSVLogger would overwrite it
                raise UserError(f"version {version} of {experiment} in {save_dir} already exists: choose another")
            self._owns_folder = not folder.exists()
        self._csv: CSVLogger | None = None
        self._logged = False  # whether this run itself logged anything; a resumed run begins with a copied log
        self._copied: set[tuple[int, str]] = set()  # (step, name) of the numbers in the last step of the copied log

    @property
    def csv(self) -> CSVLogger:
        """The logger of metrics.csv, created on first use, when the version is known; it removes an existing file."""
        if self._csv is None:
            self._csv = CSVLogger(self.save_dir, name=self.name, version=self.version, flush_logs_every_n_steps=10)
            if rank_zero_only.rank == 0:
                self._csv._experiment = _Writer(self.log_dir)
        return self._csv

    def _get_next_version(self) -> int:
        """Return the next free number; rank 0 creates its folder at once, since other runs may start meanwhile."""
        number = super()._get_next_version()
        while rank_zero_only.rank == 0:
            try:
                Path(self.root_dir, f"version_{number}").mkdir(parents=True)
                self._owns_folder = True
                break
            except FileExistsError:
                number += 1
        return number

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._logged = True
        with writing(Path(self.log_dir)):
            super().log_metrics(metrics, step)
            already_copied = step is not None and all((step, name) in self._copied for name in metrics)
            if not already_copied:
                self.csv.log_metrics(metrics, step)

    @rank_zero_only
    def copy_until(self, step: int, source: Path) -> None:
        """Begin metrics.csv with the rows of `source`, another metrics.csv, from before optimizer step `step`."""
        for logged_at, values in read_rows(source):
            # Lightning logs a training step under the number of steps before it, an evaluation under those after it.
            end = step if "train/loss" in values else step + 1
            if logged_at >= end:
                continue
            self.csv.experiment.log_metrics(values, logged_at)
            if logged_at >= step - 1:
                self._copied.update((logged_at, name) for name in values)
        self.csv.save()

    def log_hyperparams(self, params: Any = None, *_: Any, **__: Any) -> None:
        """Do nothing: config.yaml in the run folder holds all settings."""

    def save(self) -> None:
        """Flush both loggers; the parent class would also write an empty hparams.yaml."""
        with writing(Path(self.log_dir)):
            self.experiment.flush()
            self.csv.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close both loggers; remove the folder of a run that failed before it wrote any result."""
        if self._version is None or not Path(self.log_dir).is_dir():  # not created yet, or removed
            return
        folder = Path(self.log_dir)
        with writing(folder):
            super().finalize(status)
            self.csv.finalize(status)
        if status == "failed" and self._owns_folder and not self._logged and not _holds_results(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _holds_results(folder: Path) -> bool:
    """Return whether a run folder holds more than RUN_FILES and event files."""
    names = {path.name for path in folder.glob("*")}
    return not all(name.startswith("events.out.") for name in names.difference(RUN_FILES))


class RunFolder(RunLogger):
    """Run folder for runs whose loggers do not create one: laid out like RunLogger's, but nothing is logged."""

    experiment = None  # Lightning reads this attribute; TensorBoardLogger's property would create a file

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing."""


class _Writer(ExperimentWriter):
    """Lightning's writer, made atomic: a new name makes it rewrite the header, for which it truncates the file."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = self.metrics_file_path
        with replacing(Path(path)) as file:
            self.metrics_file_path = shutil.copyfile(path, file.name)
            super()._rewrite_with_new_header(fieldnames)
        self.metrics_file_path = path
