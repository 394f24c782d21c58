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
from uvit_decay.runtime.program import localise
from uvit_decay.runtime.typed import check_types
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.resumption.files import LAST, makes_folders

CONFIG = "config.yaml"
RUN_FILES = (CONFIG, METRICS, PROBES, GENERATION)  # a run may begin with them; each marks a run folder


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

    def save_config(self, trainer: Trainer, task: Task, stage: str) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(task.settings)
        self.parser.save(self.config, str(self._folder / CONFIG), skip_unset=False, overwrite=True)


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


def record(
    trainer: Trainer, path: Path, values: Mapping[str, float], metadata: dict[str, Any], logged: Mapping[str, float]
) -> None:
    """Send numbers to the loggers, then append a measurement to a history; only rank 0 may call this.

    The history is written last: a resumed run takes its entry as the sign that the evaluation was completed.

    Args:
        trainer: the trainer of the run.
        path: file of the history.
        values: results by name, for the history.
        metadata: settings that the results depend on.
        logged: numbers by name, for the loggers.
    """
    step = trainer.global_step
    steps_per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    measurement = history.Measurement(
        step=step,
        epoch=step / steps_per_epoch,
        images_seen=trainer.lightning_module.images_seen,
        values=dict(values),
        metadata=metadata,
    )
    with at_signals(trainer, leave=False):
        log_numbers(trainer, logged)
        history.append(path, measurement)


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


class Summary(Callback):
    """A message at the end of training: speed, contents of the run folder and a command that uses its checkpoint.

    In a resumed run, metrics.csv begins with the log of the previous run.
    """

    _start = 0  # step at which training started

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._start = trainer.global_step
        previous = find_previous_run(trainer)
        if previous is None or trainer.fast_dev_run:
            return
        for logger in trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.copy_until(trainer.global_step, previous / METRICS)

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        folder = run_folder(trainer)
        if not trainer.is_global_zero or trainer.fast_dev_run or trainer.global_step == self._start:
            return
        message = f"\n{trainer.global_step} steps"
        speed = trainer.callback_metrics.get("train/images_per_second")
        if speed is not None:
            message += f", {float(speed):.1f} images/s"
        contents = sorted(path.name for path in folder.iterdir())
        message += f"\nrun folder: {folder}, with {', '.join(contents)}"
        checkpoint = folder / CHECKPOINTS / LAST
        if checkpoint.exists():
            message += f"\n{_suggest_command(folder, checkpoint, task)}"
        rank_zero_info(message)


def _suggest_command(folder: Path, checkpoint: Path, task: Task) -> str:
    """Return a command that uses the checkpoint of a run: sampling of a denoiser, probes of an encoder."""
    if task.path is not None:
        return f"sample from it: {localise('python sample.py')} --ckpt {checkpoint}"
    config = folder / CONFIG
    command = f"{localise('python evaluate.py')} probe --ckpt {checkpoint}"
    if config.exists():
        command += f" --data {config}"  # the probes need its images
    return f"evaluate its features: {command}"


@check_types
class CPUThreads(Callback):
    """Sets the number of torch's intra-op threads; tiny networks are fastest with one (docs/LOG.md).

    Args:
        count: threads per process.
    """

    def __init__(self, count: int = 1) -> None:
        check_whole(1, 4096, count=count)
        self.count = count

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        torch.set_num_threads(self.count)


class _Writer(ExperimentWriter):
    """Lightning's writer, made atomic: a new name makes it rewrite the header, for which it truncates the file."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = self.metrics_file_path
        with replacing(Path(path)) as file:
            self.metrics_file_path = shutil.copyfile(path, file.name)
            super()._rewrite_with_new_header(fieldnames)
        self.metrics_file_path = path
