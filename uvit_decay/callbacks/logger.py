"""One run folder, runs/<experiment>/version_N, with TensorBoard events and metrics.csv in it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.disk import check_writable
from uvit_decay.errors import UserError


class RunLogger(TensorBoardLogger):
    """TensorBoard events and metrics.csv side by side. Two loggers of Lightning's would choose two version numbers.

    Args:
        experiment: the name of the experiment, the folder below `save_dir`.
        save_dir: where all runs are.
        version: the number or name of the run; null takes the next free number.

    Raises:
        UserError: the folder cannot be written, or holds that run already.
    """

    def __init__(self, experiment: str, save_dir: str = "runs", version: int | str | None = None) -> None:
        check_writable(Path(save_dir) / experiment, folder=True)
        # CSVLogger warns of the folder that TensorBoard has just made.
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
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
        if self._csv is None:
            self._csv = CSVLogger(self.save_dir, name=self.name, version=self.version, flush_logs_every_n_steps=10)
        return self._csv

    def _get_next_version(self) -> int:
        """The next free number, whose folder the first process makes: another run may look at the same moment."""
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
        """Nothing: config.yaml in the run folder has them all."""

    def save(self) -> None:
        """Flush both; the parent would also write an empty hparams.yaml."""
        self.experiment.flush()
        self.csv.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close both; a run that has failed before it logged or kept anything leaves no folder."""
        super().finalize(status)
        self.csv.finalize(status)
        names = [path.name for path in Path(self.log_dir).glob("*")]
        if status == "failed" and all(name == "config.yaml" or name.startswith("events.out.") for name in names):
            shutil.rmtree(self.log_dir, ignore_errors=True)
