"""LightningModules that join a network, a noise path and data for training."""

from uvit_decay.tasks.base import Task
from uvit_decay.tasks.diffusion import DiffusionTask

__all__ = ["DiffusionTask", "Task"]
