"""Base class of periodic callbacks that sample: they take a diffusion task, and its sampler or one of their own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from lightning.pytorch import Trainer

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.diffusion.nfe import estimated_seconds, total_nfe
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.diffusion import DiffusionTask


class PeriodicSampling(Periodic):
    """A periodic callback that samples images.

    Args:
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        sampling: how to sample; null means the task's.
    """

    def __init__(self, every_n_steps: int = 0, at_end: bool = True, sampling: Sampling | None = None) -> None:
        super().__init__(every_n_steps, at_end)
        self.sampling = sampling

    @abstractmethod
    def samples(self, trainer: Trainer, task: DiffusionTask) -> int:
        """Return the number of samples of one `evaluate`, over all ranks."""

    def evaluations(self, trainer: Trainer, task: DiffusionTask) -> int:
        return total_nfe(self.samples(trainer, task), self.sampling_for(task))

    def seconds(self, trainer: Trainer, task: DiffusionTask) -> float:
        sampling, share = self.sampling_for(task), self.evaluations(trainer, task) // trainer.world_size
        return estimated_seconds(task.source(), share, sampling.at_once(self.batch_size), sampling.precision)

    def precision(self, task: DiffusionTask, device: torch.device | None = None) -> Precision:
        return self.sampling_for(task, device).precision

    def sampling_for(self, task: DiffusionTask, device: torch.device | None = None) -> Sampling:
        """Return this callback's sampling, else the task's, without guidance if the network has no null label.

        If it has no precision, that of the task's sampling is used. `device` is the task's, unless given.
        """
        source = replace(task.source(), device=device or task.device)
        sampling = source.unguided(self.sampling or task.sampling)
        return source.in_precision(replace(sampling, precision=sampling.precision or task.sampling.precision))

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Raise a UserError before training if the task is not of diffusion, or does not support the sampler."""
        if not isinstance(task, DiffusionTask):
            name, kind = type(self).__name__, type(task).__name__
            raise UserError(f"{name} samples images, which a {kind} does not make: remove it from the callbacks")
        sampling = self.sampling_for(task, trainer.strategy.root_device)  # the network is moved there later
        task.source().check(sampling)
