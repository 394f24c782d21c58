"""Base class of callbacks that evaluate the network every N steps on all ranks and report their cost first."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.ema import averaged
from uvit_decay.callbacks.run_log import continue_history, run_folder
from uvit_decay.diffusion.nfe import estimated_seconds
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.runtime.errors import check_whole
from uvit_decay.tasks.diffusion import DiffusionTask


class Periodic(Callback):
    """A callback that calls `evaluate` every N steps and at the end of training, and prints its cost before the first.

    Args:
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        sampling: how to sample, for callbacks that do; null means the task's.
    """

    batch_size: int  # images per batch on each device
    history_file: str | None = None  # name of the history of its measurements in the run folder

    def __init__(self, every_n_steps: int = 0, at_end: bool = True, sampling: Sampling | None = None) -> None:
        check_whole(0, every_n_steps=every_n_steps)
        self.every_n_steps, self.at_end, self.sampling = every_n_steps, at_end, sampling
        self.folder = Path()  # the run folder, set before each evaluation
        self._seen_step = -1
        self._announced = False

    @abstractmethod
    def evaluate(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Evaluate the network and write the results; called on all ranks."""

    @abstractmethod
    def nfe(self, trainer: Trainer, task: DiffusionTask) -> int:
        """Return the network evaluations (NFE times images) of one `evaluate`, over all ranks."""

    def seconds_besides(self, trainer: Trainer, task: DiffusionTask) -> float:
        """Return the cost of one `evaluate` besides network evaluations, in seconds."""
        return 0.0

    def sampling_for(self, task: DiffusionTask, source: DiffusionModel | None = None) -> Sampling:
        """Return this callback's sampling, else the task's, without guidance if the network has no null label.

        If it has no precision, that of the task's sampling is used; callbacks that do not sample use it, too. `source`
        is the task's model, unless given.
        """
        source = source or task.source()
        sampling = source.unguided(self.sampling or task.sampling)
        return source.in_precision(replace(sampling, precision=sampling.precision or task.sampling.precision))

    def setup(self, trainer: Trainer, task: DiffusionTask, stage: str) -> None:
        """Raise a UserError before training if path or network do not support the sampler."""
        source = replace(task.source(), device=trainer.strategy.root_device)  # the network is moved there later
        source.check(self.sampling_for(task, source))

    def on_train_start(self, trainer: Trainer, task: DiffusionTask) -> None:
        self._seen_step = trainer.global_step
        if self.history_file:
            continue_history(trainer, self.history_file)

    def on_train_batch_end(self, trainer: Trainer, task: DiffusionTask, *_: Any) -> None:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._evaluate_once(trainer, task)

    def on_train_end(self, trainer: Trainer, task: DiffusionTask) -> None:
        if self.at_end:
            self._evaluate_once(trainer, task)

    def _evaluate_once(self, trainer: Trainer, task: DiffusionTask) -> None:
        if trainer.global_step == self._seen_step or trainer.fast_dev_run:
            return
        self._seen_step = trainer.global_step
        self.folder = run_folder(trainer)
        if not self._announced:
            self._announced = True
            self._announce(trainer, task)
        self.evaluate(trainer, task)

    def _announce(self, trainer: Trainer, task: DiffusionTask) -> None:
        count = self.nfe(trainer, task)
        with averaged(trainer, task):
            sampling, share = self.sampling_for(task), count // trainer.world_size
            batch = sampling.at_once(self.batch_size)
            seconds = estimated_seconds(task.source(), share, batch, sampling.precision)
            seconds += self.seconds_besides(trainer, task)
        rank_zero_info(f"{type(self).__name__}: {count} network evaluations, about {seconds:.0f} s")
