"""Base class of callbacks that evaluate the network every N steps, on all ranks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image

from uvit_decay.callbacks.progress import Progress
from uvit_decay.callbacks.stopping import at_signals
from uvit_decay.data.datamodule import ImageData
from uvit_decay.diffusion.sampling import Sampling, total_nfe
from uvit_decay.files.writing import quote_path
from uvit_decay.pictures import save_image
from uvit_decay.runs import history
from uvit_decay.runs.folder import find_previous_run, run_folder
from uvit_decay.runs.history import run_of
from uvit_decay.runs.loggers import log_numbers, log_picture
from uvit_decay.runtime.precision import Precision, chosen_precision
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.diffusion import DiffusionTask
from uvit_decay.tasks.loader_data import LoaderData
from uvit_decay.terminal.errors import UserError, check_whole, with_flags
from uvit_decay.terminal.program import localise
from uvit_decay.terminal.progress import Work, track


class Periodic(Callback):
    """A callback that calls `evaluate` every N steps and at the end of training.

    Args:
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    batch_size: int  # images per batch on each device
    history_file: str | None = None  # file name of its measurements in the run folder
    picture: str | None = None  # name of its pictures in the run folder
    reads_images = True  # whether it needs a data module of uvit_decay.data; otherwise any loader will do
    command: str | None = None  # what computes its results from a {checkpoint} and the {config} beside it
    asked: Precision | None = None  # precision of the network; None: the precision of the task's sampling

    def __init__(self, every_n_steps: int = 0, at_end: bool = True, every_n_epochs: int | None = None) -> None:
        check_whole(0, every_n_steps=every_n_steps, every_n_epochs=every_n_epochs or 0)
        self.every_n_steps = every_n_steps
        self.at_end = at_end
        self.every_n_epochs = every_n_epochs
        self.folder = Path()  # the run folder, set before each evaluation
        self.evaluated = -1  # step of the newest evaluation, or of the start of training
        self.left_out: str | None = None  # why nothing is evaluated in this run

    @abstractmethod
    def evaluate(self, trainer: Trainer, task: Task) -> Mapping[str, float] | None:
        """Evaluate the network and write the results; called on all ranks.

        Returns:
            On rank 0, the values that are recorded in `history_file`, by name; otherwise None.
        """

    @abstractmethod
    def evaluations(self, trainer: Trainer, task: Task) -> int:
        """Return the number of network evaluations of one `evaluate`, over all ranks; each image counts once."""

    def precision(self, task: Task) -> Precision:
        """Return the precision of the network: `asked`, or the task's sampling precision, or the device's default."""
        asked = self.asked
        if asked is None and task.sampling:
            asked = task.sampling.precision
        return chosen_precision(asked, task.trainer.strategy.root_device)  # the network may be moved there later

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Check the precision and the data module before training."""
        self.precision(task)
        if self.reads_images and not isinstance(trainer.datamodule, ImageData):
            name = type(self).__name__
            raise UserError(f"{name} reads images by number: pass a data module of uvit_decay.data, not a DataLoader")

    def prepare_evaluation(self, trainer: Trainer, task: Task) -> None:
        """Check and load what `evaluate` needs, before training; long work belongs in `on_fit_start`."""

    def find_obstacle(self, data: ImageData | LoaderData) -> str | None:
        """Return why nothing can be evaluated with these data, such as too few images; None if nothing is missing."""
        return None

    def prepare(self, trainer: Trainer, task: Task) -> None:
        """Prepare the evaluations, or print why they are left out."""
        self.left_out = self.find_obstacle(task.data)
        if self.left_out is None:
            self.prepare_evaluation(trainer, task)
        else:
            rank_zero_info(with_flags(f"warning: {type(self).__name__} are left out: {self.left_out}"))

    def prepare_once(self, trainer: Trainer, task: Task) -> None:
        """Make what all evaluations of a run share and this machine keeps; called after `prepare`."""

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        with self._shown(trainer):
            self.prepare(trainer, task)

    def _intervals(self, epoch: float) -> list[int]:
        """Return the numbers of steps whose multiples are due, given the steps of an epoch, which may be infinite."""
        intervals = [self.every_n_steps] if self.every_n_steps else []
        if self.every_n_epochs and not math.isinf(epoch):
            intervals.append(self.every_n_epochs * int(epoch))
        return intervals

    def is_due(self, step: int, epoch: float) -> bool:
        """Return whether an evaluation is due after optimizer step `step`, apart from the one at the end of the run.

        Args:
            step: the optimizer step.
            epoch: optimizer steps of an epoch, which may be infinite.
        """
        return any(step % every == 0 for every in self._intervals(epoch))

    def count_due(self, epoch: float, first: int, last: int) -> int:
        """Return the number of evaluations of a run.

        Args:
            epoch: optimizer steps of an epoch, which may be infinite.
            first: step at which the run begins or resumes.
            last: step of its end.
        """
        intervals = self._intervals(epoch)
        count = sum(last // every - first // every for every in intervals)
        if len(intervals) == 2:  # a step that is due for both reasons is evaluated once
            both = math.lcm(*intervals)
            count -= last // both - first // both
        if self.at_end and last > first and not self.is_due(last, epoch):
            count += 1
        return count

    def _shown(self, trainer: Trainer, when: str = "") -> AbstractContextManager[Work]:
        """Show the progress of this callback in the context, if the run has our progress bar."""
        progress = trainer.progress_bar_callback
        if isinstance(progress, Progress):
            return progress.track(type(self).__name__ + when)
        return track(shown=False)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Evaluate at the step from which a run resumes, if that is due and not recorded."""
        step = self.evaluated = trainer.global_step
        previous = find_previous_run(trainer)
        was_end = self.at_end and task.start is not None and task.start.ended
        due = was_end or self._is_due_now(trainer, task)
        missing = previous is not None and due and not self.has_record(previous, step)
        if trainer.strategy.broadcast(missing):
            self.evaluated = -1
            self._evaluate_once(trainer, task)

    def has_record(self, folder: Path, step: int) -> bool:
        """Return whether a run folder has a record of the evaluation at a step; true if this callback keeps none."""
        if self.history_file:
            measurements = history.read(folder / self.history_file)
            return any(measurement.step == step for measurement in measurements)
        if self.picture:
            return picture_path(folder, self.picture, step).exists()
        return True

    def _is_due_now(self, trainer: Trainer, task: Task) -> bool:
        epoch = task.run_length()[0] if self.every_n_epochs else math.inf
        return self.is_due(trainer.global_step, epoch)

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if self._is_due_now(trainer, task):
            self._evaluate_once(trainer, task)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        if self.at_end:
            self._evaluate_once(trainer, task)

    def _evaluate_once(self, trainer: Trainer, task: Task) -> None:
        if trainer.global_step == self.evaluated or trainer.fast_dev_run or self.left_out is not None:
            return
        self.folder = run_folder(trainer)
        with at_signals(trainer, leave=True), self._shown(trainer, f" at step {trainer.global_step}"):
            values = self.evaluate(trainer, task)
        self.evaluated = trainer.global_step
        if self.history_file:  # all ranks get the values: callbacks such as BestCheckpoint must decide the same
            for name, value in (trainer.strategy.broadcast(values) or {}).items():
                trainer.callback_metrics[name] = torch.tensor(float(value))


def list_missing_results(callbacks: Iterable[Callback], checkpoint: Path, step: int, data: ImageData) -> list[str]:
    """Return the commands that compute the results which a run lacks at its end, because a kill came before them.

    Args:
        callbacks: callbacks of the run.
        checkpoint: its last checkpoint.
        step: the step of this checkpoint.
        data: data of the run, loaded only if a result is missing.
    """
    folder = run_of(checkpoint)
    lines = []
    for callback in callbacks:
        if folder is None or not isinstance(callback, Periodic) or not (callback.at_end and callback.command):
            continue
        if callback.has_record(folder, step):
            continue
        if data.train is None:
            data.load()
        if callback.find_obstacle(data) is None:
            config = quote_path(folder / history.CONFIG)
            lines.append(localise(callback.command.format(checkpoint=quote_path(checkpoint), config=config)))
    return lines


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
    task = trainer.lightning_module
    images_per_epoch = task.data.batch_size * trainer.num_training_batches / trainer.accumulate_grad_batches
    measurement = history.Measurement(
        step=step,
        epoch=task.images_seen / images_per_epoch,  # earlier steps may have had another batch size
        images_seen=task.images_seen,
        values=dict(values),
        metadata=metadata,
    )
    with at_signals(trainer, leave=False):
        log_numbers(trainer, logged)
        history.append(path, measurement)


def picture_path(folder: Path, name: str, step: int) -> Path:
    """Return the path of the picture `name` of a step in the run folder."""
    return folder / name / f"step_{step:08d}.png"


def save_picture(trainer: Trainer, folder: Path, name: str, picture: Image.Image) -> None:
    """Save a picture as <name>.png and <name>/step_N.png in the run folder, and log it; only rank 0 may call this."""
    path = picture_path(folder, name, trainer.global_step)
    path.parent.mkdir(exist_ok=True)
    save_image(folder / f"{name}.png", picture)
    log_picture(trainer, folder / f"{name}.png")
    save_image(path, picture)  # last: a resumed run takes it as the sign that the evaluation was completed


class PeriodicSampling(Periodic):
    """A periodic callback that samples images.

    Args:
        sampling: how to sample; null means the task's.
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    def __init__(
        self,
        sampling: Sampling | None = None,
        every_n_steps: int = 0,
        at_end: bool = True,
        every_n_epochs: int | None = None,
    ) -> None:
        super().__init__(every_n_steps, at_end, every_n_epochs)
        self.sampling = sampling
        self.asked = sampling.precision if sampling else None

    @abstractmethod
    def samples(self, trainer: Trainer, task: DiffusionTask) -> int:
        """Return the number of samples of one `evaluate`, over all ranks."""

    def evaluations(self, trainer: Trainer, task: DiffusionTask) -> int:
        return total_nfe(self.samples(trainer, task), self.sampling_for(task))

    def sampling_for(self, task: DiffusionTask) -> Sampling:
        """Return the sampling of the callback or of the task, without guidance if the network has no null label."""
        sampling = task.source().unguided(self.sampling or task.sampling)
        return replace(sampling, precision=self.precision(task))

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Check the sampler, too."""
        super().setup(trainer, task, stage)
        task.source().check(self.sampling_for(task))
