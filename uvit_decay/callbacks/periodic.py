"""Base class of callbacks that evaluate the network every N steps, on all ranks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image

from uvit_decay import history
from uvit_decay.callbacks.loggers import log_picture
from uvit_decay.callbacks.run_log import continue_history, continued_folder, run_folder
from uvit_decay.callbacks.stopping import at_signals
from uvit_decay.data.datamodule import ImageData
from uvit_decay.diffusion.sampling import Sampling, total_nfe
from uvit_decay.image_io import save_image
from uvit_decay.runtime.errors import UserError, check_whole
from uvit_decay.runtime.files import check_writable
from uvit_decay.runtime.precision import Precision, chosen_precision
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.diffusion import DiffusionTask


class Periodic(Callback):
    """A callback that calls `evaluate` every N steps and at the end of training.

    Args:
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    batch_size: int  # images per batch on each device
    history_file: str | None = None  # name of the history of its measurements in the run folder
    picture: str | None = None  # name of its pictures there
    reads_images = True  # of the data module; otherwise it works with any loader, too
    asked: Precision | None = None  # precision of the network, in place of that of the task's sampling

    def __init__(self, every_n_steps: int = 0, at_end: bool = True, every_n_epochs: int | None = None) -> None:
        check_whole(0, every_n_steps=every_n_steps, every_n_epochs=every_n_epochs or 0)
        self.every_n_steps, self.at_end, self.every_n_epochs = every_n_steps, at_end, every_n_epochs
        self.folder = Path()  # the run folder, set before each evaluation
        self.evaluated = -1  # the step of the newest evaluation, or at which training started

    @abstractmethod
    def evaluate(self, trainer: Trainer, task: Task) -> None:
        """Evaluate the network and write the results; called on all ranks."""

    @abstractmethod
    def evaluations(self, trainer: Trainer, task: Task) -> int:
        """Return the network evaluations, each image counted, of one `evaluate`, over all ranks."""

    def precision(self, task: Task) -> Precision:
        """Return the precision of the network here: `asked`, that of the task's sampling, or the device's default."""
        asked = self.asked or (task.sampling.precision if task.sampling else None)
        return chosen_precision(asked, task.trainer.strategy.root_device)  # where the network is, or is moved later

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Raise a UserError before training for a precision that the device lacks, or without a data module.

        Warn of a callback with the same history, which has one line for each step.
        """
        self.precision(task)
        if self.reads_images and not isinstance(trainer.datamodule, ImageData):
            name = type(self).__name__
            raise UserError(f"{name} reads images by number: pass a data module of uvit_decay.data, not a DataLoader")
        periodic = [other for other in trainer.callbacks if isinstance(other, Periodic)]
        if self.history_file and [c for c in periodic if c.history_file == self.history_file][1:2] == [self]:
            what = f"{type(self).__name__} is there twice"
            rank_zero_info(f"warning: {what}: at the same step, the second replaces the first in {self.history_file}")

    def ready(self, trainer: Trainer, task: Task) -> None:
        """Check and load what `evaluate` needs before training, apart from long work, which extends `on_fit_start`."""

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self.ready(trainer, task)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Continue the history of the previous run, and evaluate at its last step if that is due and not recorded."""
        step = self.evaluated = trainer.global_step
        if self.history_file:
            continue_history(trainer, self.history_file)
        previous = continued_folder(trainer)
        missing = previous is not None and self._is_due(trainer) and not self._recorded(previous, step)
        if trainer.strategy.broadcast(missing):
            self.evaluated = -1
            self._evaluate_once(trainer, task)

    def _recorded(self, folder: Path, step: int) -> bool:
        """Return whether the run in `folder` has recorded the evaluation of a step; true if it keeps no record."""
        if self.history_file:
            return step in [measurement.step for measurement in history.read(folder / self.history_file)]
        return self.picture is None or picture_path(folder, self.picture, step).exists()

    def _is_due(self, trainer: Trainer) -> bool:
        epoch = trainer.num_training_batches // trainer.accumulate_grad_batches if self.every_n_epochs else 0
        return any(n and trainer.global_step % n == 0 for n in (self.every_n_steps, epoch * (self.every_n_epochs or 0)))

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if self._is_due(trainer):
            self._evaluate_once(trainer, task)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        if self.at_end:
            self._evaluate_once(trainer, task)

    def _evaluate_once(self, trainer: Trainer, task: Task) -> None:
        if trainer.global_step == self.evaluated or trainer.fast_dev_run:
            return
        self.folder = run_folder(trainer)
        with at_signals(trainer, leave=True):
            self.evaluate(trainer, task)
        self.evaluated = trainer.global_step


def picture_path(folder: Path, name: str, step: int) -> Path:
    """Return the file of a picture of a step in the run folder."""
    return folder / name / f"step_{step:08d}.png"


def save_picture(trainer: Trainer, folder: Path, name: str, picture: Image.Image) -> None:
    """Save <name>.png, the newest, and <name>/step_N.png in the run folder, and log it; for rank 0 alone."""
    path = picture_path(folder, name, trainer.global_step)
    check_writable(path)
    save_image(folder / f"{name}.png", picture)
    log_picture(trainer, folder / f"{name}.png")
    save_image(path, picture)  # last: a resumed run takes it as the sign that all is done


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
        """Return this callback's sampling, else the task's, without guidance if the network has no null label."""
        return replace(task.source().unguided(self.sampling or task.sampling), precision=self.precision(task))

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Raise a UserError before training if the task is not of diffusion, or does not support the sampler."""
        if not isinstance(task, DiffusionTask):
            name, kind = type(self).__name__, type(task).__name__
            raise UserError(f"{name} samples images, which a {kind} does not make: remove it from the callbacks")
        super().setup(trainer, task, stage)
        task.source().check(self.sampling_for(task))
