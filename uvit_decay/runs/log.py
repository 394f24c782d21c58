"""The loggers of the run folder: TensorBoard events and metrics.csv, whose rows a resumed run continues."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import CSVLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.files.writing import LOCK, check_writable, list_missing, writing
from uvit_decay.runs.folder import RUN_FILES
from uvit_decay.runs.history import METRICS
from uvit_decay.runs.lightning_private import keep_rows
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types


@check_types
class RunLogger(TensorBoardLogger):
    """Logger of TensorBoard events and metrics.csv in one folder; two Lightning loggers would choose two versions.

    Args:
        experiment: name of the experiment, and of its folder below `save_dir`; null, for train.py only, is the name of
            the data.
        save_dir: folder of all experiments.
        version: number or name of the run; null takes the next free number.
    """

    def __init__(self, experiment: str | None, save_dir: str | Path = "runs", version: int | str | None = None) -> None:
        if experiment is None:
            raise UserError("RunLogger needs the name of the experiment: set experiment")
        check_writable(Path(save_dir) / experiment, folder=True, make=False)
        super().__init__(save_dir, name=experiment, version=version, default_hp_metric=False)
        # The folders that this logger makes, the run folder first; a run that fails to start removes them.
        self._made = [] if version is None else list_missing(Path(self.log_dir))
        self._is_new = version is not None  # whether the folder must not hold a log
        self._csv: CSVLogger | None = None
        self._logged = False  # whether this run itself logged anything; a resumed run begins with earlier rows

    def go_on(self, version: int | str) -> None:
        """Continue the log of a version."""
        self._version = version
        self._made = []
        self._is_new = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of TensorBoard's events, created on first use."""
        self._check_new()
        return super().experiment

    def _check_new(self) -> None:
        """Raise a UserError, at the first call, if a version that the user gives has a log."""
        if self._is_new and (Path(self.log_dir) / METRICS).exists():
            where = f"version {self.version} of {self.name} in {self.save_dir}"
            raise UserError(f"{where} already exists: choose another")
        self._is_new = False

    @property
    def csv(self) -> CSVLogger:
        """The logger of metrics.csv, created on first use, when the version is known."""
        if self._csv is None:
            self._check_new()
            self._csv = CSVLogger(self.save_dir, name=self.name, version=self.version, flush_logs_every_n_steps=10)
            keep_rows(self._csv)
        return self._csv

    def _get_next_version(self) -> int:
        """Return the next free number; rank 0 creates its folder at once, since other runs may start meanwhile."""
        number = super()._get_next_version()
        while rank_zero_only.rank == 0:
            folder = Path(self.root_dir, f"version_{number}")
            missing = list_missing(folder)
            try:
                folder.mkdir(parents=True)
                self._made = missing
                break
            except FileExistsError:
                number += 1
        return number

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._logged = True
        with writing(Path(self.log_dir)):
            super().log_metrics(metrics, step)
            self.csv.log_metrics(metrics, step)

    def log_hyperparams(self, params: Any = None, *_: Any, **__: Any) -> None:
        """Do nothing: config.yaml in the run folder holds all settings."""

    def save(self) -> None:
        """Flush both loggers; the parent class would also write an empty hparams.yaml."""
        with writing(Path(self.log_dir)):
            self.csv.save()
            self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close both loggers; remove the folders of a run that failed before it wrote any result."""
        if self._version is None or not Path(self.log_dir).is_dir():  # not created yet, or removed
            return
        folder = Path(self.log_dir)
        with writing(folder):
            super().finalize(status)
            if self._csv is not None:
                self._csv.finalize(status)
        names = {path.name for path in folder.glob("*")}.difference((*RUN_FILES, LOCK))
        is_empty = all(name.startswith("events.out.") for name in names)
        if status == "failed" and self._made and not self._logged and is_empty:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another run is in the folder of the experiment
                for outer in self._made[1:]:
                    outer.rmdir()


class RunFolder(RunLogger):
    """Run folder for runs whose loggers do not create one: laid out like RunLogger's, but nothing is logged."""

    experiment = None  # Lightning reads this attribute; TensorBoardLogger's property would create a file

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Note that there are results; they are not logged."""
        self._logged = True

    def save(self) -> None:
        """Do nothing."""
