"""The run folder, runs/<experiment>/version_N, and the logger that writes TensorBoard events and metrics.csv to it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable


class RunLogger(TensorBoardLogger):
    """Logger of TensorBoard events and metrics.csv in one folder; two Lightning loggers would choose two versions.

    Args:
        experiment: name of the experiment, and of its folder below `save_dir`.
        save_dir: folder of all experiments.
        version: number or name of the run; null takes the next free number.

    Raises:
        UserError: the folder cannot be written, or that run exists already.
    """

    def __init__(self, experiment: str, save_dir: str = "runs", version: int | str | None = None) -> None:
        check_writable(Path(save_dir) / experiment, folder=True)
        # CSVLogger warns that the folder exists, which TensorBoard has just made.
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
        # A number is the folder version_<number>, a name the folder itself. metrics.csv marks a run: CSVLogger would
        # overwrite it.
        if (
            version is not None
            and (
                Path(save_dir, experiment, f"version_{version}" if isinstance(version, int) else version)
                / "metrics.csv"
            ).exists()
        ):
            raise UserError(f"version {version} of {experiment} in {save_dir} is there already: choose another")
        super().__init__(save_dir, name=experiment, version=version, default_hp_metric=False)
        self._csv: CSVLogger | None = None

    @property
    def csv(self) -> CSVLogger:
        """The logger of metrics.csv, made on first use, when the version is known."""
        if self._csv is None:
            self._csv = CSVLogger(self.save_dir, name=self.name, version=self.version, flush_logs_every_n_steps=10)
        return self._csv

    def _get_next_version(self) -> int:
        """Return the next free number; rank 0 makes its folder at once, since other runs may start at the same time."""
        number = super()._get_next_version()
        while rank_zero_only.rank == 0:
            try:
                Path(self.root_dir, f"version_{number}").mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
        return number

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        self.csv.log_metrics(metrics, step)

    def log_hyperparams(self, params: Any = None, *_: Any, **__: Any) -> None:
        """Do nothing: config.yaml in the run folder holds all settings."""

    def save(self) -> None:
        """Flush both loggers; the parent class would also write an empty hparams.yaml."""
        self.experiment.flush()
        self.csv.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close both loggers; remove the folder of a run that failed before it wrote any result."""
        super().finalize(status)
        self.csv.finalize(status)
        names = [path.name for path in Path(self.log_dir).glob("*")]
        if status == "failed" and all(name == "config.yaml" or name.startswith("events.out.") for name in names):
            shutil.rmtree(self.log_dir, ignore_errors=True)
