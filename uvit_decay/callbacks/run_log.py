"""The run folder, runs/<experiment>/version_N: its logger, the log of a run that it continues, and its summary."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from uvit_decay import history
from uvit_decay.callbacks.loggers import guard, log_numbers
from uvit_decay.callbacks.stopping import at_signals
from uvit_decay.history import CHECKPOINTS, GENERATION, METRICS, PROBES, read_rows, run_of
from uvit_decay.runtime.errors import UserError, check_whole
from uvit_decay.runtime.files import check_writable, replacing, writing
from uvit_decay.runtime.program import localised
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.resumption.files import makes_folders

CONFIG = "config.yaml"
HELD = (CHECKPOINTS, CONFIG, METRICS, PROBES, GENERATION)  # what shows that a folder holds a run


def run_folder(trainer: Trainer) -> Path:
    """Return the run folder, the same on all ranks, and make it if it is missing; all ranks must call this.

    It is that of the first logger that makes one, or the trainer's default_root_dir.
    """
    logger = next(filter(makes_folders, trainer.loggers), None)
    folder = Path(trainer.strategy.broadcast(logger.log_dir if logger else trainer.default_root_dir))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml to the run folder, which may hold no other run, and guards the loggers against failures."""

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            guard(logger)
        self._folder = run_folder(trainer)
        held = trainer.is_global_zero and any((self._folder / name).exists() for name in HELD)
        if trainer.strategy.broadcast(held) and not self.already_saved:
            raise UserError(f"{self._folder} holds a run already: choose another version or folder of the logger")
        super().setup(trainer, task, stage)

    def save_config(self, trainer: Trainer, task: Task, stage: str) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(task.settings)
        self.parser.save(self.config, str(self._folder / CONFIG), skip_unset=False, overwrite=True)


def continued_folder(trainer: Trainer) -> Path | None:
    """Return the folder of the run that this one continues, None if it continues none, or an unknown one."""
    return run_of(trainer.ckpt_path) if trainer.ckpt_path else None


def continue_history(trainer: Trainer, name: str) -> None:
    """Begin a history with that of the run which this one continues, up to its step; all ranks must call this."""
    earlier = continued_folder(trainer)
    if earlier and not trainer.fast_dev_run:
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            history.copy_until(trainer.global_step, earlier / name, folder / name)


def record(
    trainer: Trainer, path: Path, values: Mapping[str, float], metadata: dict[str, Any], logged: Mapping[str, float]
) -> None:
    """Send `logged` to the loggers, and append a measurement to the history at `path`; only rank 0 may call this.

    The history is last: a resumed run takes it as the sign that all is done.
    """
    step, batches = trainer.global_step, trainer.num_training_batches / trainer.accumulate_grad_batches
    images = trainer.lightning_module.images_seen
    measurement = history.Measurement(step, step / batches, images, dict(values), metadata)
    with at_signals(trainer, leave=False):
        log_numbers(trainer, logged)
        history.append(path, measurement)


class RunLogger(TensorBoardLogger):
    """Logger of TensorBoard events and metrics.csv in one folder; two Lightning loggers would choose two versions.

    Args:
        experiment: name of the experiment, and of its folder below `save_dir`.
        save_dir: folder of all experiments.
        version: number or name of the run; null takes the next free number.
    """

    def __init__(self, experiment: str, save_dir: str = "runs", version: int | str | None = None) -> None:
        check_writable(Path(save_dir) / experiment, folder=True)
        # CSVLogger warns that the folder exists, which TensorBoard has just made.
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
        super().__init__(save_dir, name=experiment, version=version, default_hp_metric=False)
        folder = None if version is None else Path(self.log_dir)
        if folder and (folder / METRICS).exists():  # which marks a run: CSVLogger would overwrite it
            raise UserError(f"version {version} of {experiment} in {save_dir} exists already: choose another")
        self._csv: CSVLogger | None = None
        self._logged = False  # whether this run itself logged anything; a resumed one begins with a copied log
        self._made = folder is not None and not folder.exists()  # whether the folder is this run's own
        self._copied: set[tuple[int, str]] = set()  # step and name of numbers in the copied log, of its last step

    @property
    def csv(self) -> CSVLogger:
        """The logger of metrics.csv, made on first use, when the version is known; a file that is there is removed."""
        if self._csv is None:
            self._csv = CSVLogger(self.save_dir, name=self.name, version=self.version, flush_logs_every_n_steps=10)
            if rank_zero_only.rank == 0:
                self._csv._experiment = _Writer(self.log_dir)
        return self._csv

    def _get_next_version(self) -> int:
        """Return the next free number; rank 0 makes its folder at once, since other runs may start at the same time."""
        number = super()._get_next_version()
        while rank_zero_only.rank == 0:
            try:
                Path(self.root_dir, f"version_{number}").mkdir(parents=True)
                self._made = True
                break
            except FileExistsError:
                number += 1
        return number

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._logged = True
        with writing(Path(self.log_dir)):
            super().log_metrics(metrics, step)
            if step is None or not self._copied >= {(step, name) for name in metrics}:
                self.csv.log_metrics(metrics, step)

    @rank_zero_only
    def copy_until(self, step: int, source: Path) -> None:
        """Begin metrics.csv with the rows of another one, `source`, that were logged before optimizer step `step`."""
        for logged_at, values in read_rows(source):
            # Lightning logs a training step under the number of steps before it, an evaluation after a step.
            if logged_at < step + ("train/loss" not in values):
                self.csv.experiment.log_metrics(values, logged_at)
                if logged_at >= step - 1:
                    self._copied |= {(logged_at, name) for name in values}
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
        if self._version is None or not Path(self.log_dir).is_dir():  # there was none yet, or it has been removed
            return
        with writing(Path(self.log_dir)):
            super().finalize(status)
            self.csv.finalize(status)
        names = {path.name for path in Path(self.log_dir).glob("*")} - {CONFIG, METRICS, PROBES, GENERATION}
        nothing_new = all(name.startswith("events.out.") for name in names)
        if status == "failed" and self._made and nothing_new and not self._logged:
            shutil.rmtree(self.log_dir, ignore_errors=True)


class RunFolder(RunLogger):
    """The folder of a run whose loggers make none, as that of a RunLogger, and without a log."""

    experiment = None  # Lightning asks for it, and TensorBoard's would begin a file

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing."""


class Summary(Callback):
    """A message at the end of training: speed, contents of the run folder and a command that uses its checkpoint.

    When training starts, metrics.csv begins with the log of the run that this one continues.
    """

    _start = 0  # step at which training started

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._start = trainer.global_step
        earlier = continued_folder(trainer)
        for logger in trainer.loggers if earlier and not trainer.fast_dev_run else ():
            if isinstance(logger, RunLogger):
                logger.copy_until(trainer.global_step, earlier / METRICS)

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        folder = run_folder(trainer)
        if not trainer.is_global_zero or trainer.fast_dev_run or trainer.global_step == self._start:
            return
        speed = trainer.callback_metrics.get("train/images_per_second")
        lines = [f"\n{trainer.global_step} steps" + (f", {float(speed):.1f} images/s" if speed is not None else "")]
        lines += [f"run folder: {folder}, with {', '.join(sorted(path.name for path in folder.iterdir()))}"]
        checkpoint = folder / "checkpoints" / "last.ckpt"
        if checkpoint.exists():
            lines += [_use(folder, checkpoint, task)]
        rank_zero_info("\n".join(lines))


def _use(folder: Path, checkpoint: Path, task: Task) -> str:
    """Return a command that uses a run's checkpoint, with the images of its configuration where it needs some."""
    if task.path is not None:
        return f"sample from it: {localised('python sample.py')} --ckpt {checkpoint}"
    config = folder / CONFIG
    data = f" --data {config}" if config.exists() else ""
    return f"judge its features: {localised('python evaluate.py')} probe --ckpt {checkpoint}{data}"


class CPUThreads(Callback):
    """Number of torch's intra-op threads. Tiny networks are fastest with one: more wait for each other (docs/LOG.md).

    Args:
        count: threads of each process.
    """

    def __init__(self, count: int = 1) -> None:
        check_whole(1, 4096, count=count)
        self.count = count

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        torch.set_num_threads(self.count)


class _Writer(ExperimentWriter):
    """Lightning's writer, which truncates the file when a number of a new name makes it rewrite the header."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = self.metrics_file_path
        with replacing(Path(path)) as file:
            self.metrics_file_path = shutil.copyfile(path, file.name)
            super()._rewrite_with_new_header(fieldnames)
        self.metrics_file_path = path
