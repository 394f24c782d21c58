"""Base class of callbacks that evaluate the network every N steps on all ranks and report their cost first."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay import history
from uvit_decay.callbacks.ema import averaged
from uvit_decay.callbacks.run_log import continue_history, continued_folder, run_folder
from uvit_decay.runtime.errors import check_whole
from uvit_decay.runtime.precision import Precision, chosen_precision
from uvit_decay.tasks.base import Task


class Periodic(Callback):
    """A callback that calls `evaluate` every N steps and at the end of training, and prints its cost before the first.

    Args:
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    batch_size: int  # images per batch on each device
    history_file: str | None = None  # name of the history of its measurements in the run folder
    asked: Precision | None = None  # precision of the network, in place of that of the task's sampling

    def __init__(self, every_n_steps: int = 0, at_end: bool = True, every_n_epochs: int | None = None) -> None:
        check_whole(0, every_n_steps=every_n_steps, every_n_epochs=every_n_epochs or 0)
        self.every_n_steps, self.at_end, self.every_n_epochs = every_n_steps, at_end, every_n_epochs
        self.folder = Path()  # the run folder, set before each evaluation
        self.evaluated = -1  # the step of the newest evaluation in this run
        self._seen_step = -1
        self._announced = False

    @abstractmethod
    def evaluate(self, trainer: Trainer, task: Task) -> None:
        """Evaluate the network and write the results; called on all ranks."""

    @abstractmethod
    def evaluations(self, trainer: Trainer, task: Task) -> int:
        """Return the network evaluations, each image counted, of one `evaluate`, over all ranks."""

    @abstractmethod
    def seconds(self, trainer: Trainer, task: Task) -> float:
        """Estimate the seconds of one `evaluate`; called with the averaged weights."""

    def precision(self, task: Task, device: torch.device | None = None) -> Precision:
        """Return the precision of the network here: `asked`, that of the task's sampling, or the device's default.

        `device` is the task's, unless given.
        """
        asked = self.asked or (task.sampling.precision if task.sampling else None)
        return chosen_precision(asked, device or task.device)

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Raise a UserError before training for a precision that the device lacks; the network is moved there later."""
        self.precision(task, trainer.strategy.root_device)

    def ready(self, trainer: Trainer, task: Task) -> None:
        """Check and load what `evaluate` needs before training, apart from long work, which extends `on_fit_start`."""

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self.ready(trainer, task)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Begin with the history of the run that this one continues; evaluate now what that run has missed.

        The checkpoint of a step is saved before its evaluation, in which the run may have been stopped.
        """
        if self.history_file:
            continue_history(trainer, self.history_file)
        if not (continued_folder(trainer) and self._due(trainer)) or self._measured(trainer):
            self._seen_step = trainer.global_step
        else:
            self._evaluate_once(trainer, task)

    def _due(self, trainer: Trainer) -> bool:
        epoch = trainer.num_training_batches // trainer.accumulate_grad_batches if self.every_n_epochs else 0
        return any(n and trainer.global_step % n == 0 for n in (self.every_n_steps, epoch * (self.every_n_epochs or 0)))

    def _measured(self, trainer: Trainer) -> bool:
        """Return whether the history has a measurement of this step, on all ranks."""
        path = run_folder(trainer) / (self.history_file or "")
        found = bool(self.history_file and trainer.is_global_zero) and any(
            measurement.step == trainer.global_step for measurement in history.read(path)
        )
        return trainer.strategy.broadcast(found)

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if self._due(trainer):
            self._evaluate_once(trainer, task)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        if self.at_end:
            self._evaluate_once(trainer, task)

    def _evaluate_once(self, trainer: Trainer, task: Task) -> None:
        if trainer.global_step == self._seen_step or trainer.fast_dev_run:
            return
        self._seen_step = trainer.global_step
        self.folder = run_folder(trainer)
        if not self._announced:
            self._announced = True
            with averaged(trainer, task):
                count, seconds = self.evaluations(trainer, task), self.seconds(trainer, task)
            rank_zero_info(f"{type(self).__name__}: {count} network evaluations, about {seconds:.0f} s")
        self.evaluate(trainer, task)
        self.evaluated = trainer.global_step
