"""LightningModules: where networks and diffusion meet."""

from uvit_decay.tasks.base import Task
from uvit_decay.tasks.diffusion import DiffusionTask

__all__ = ["DiffusionTask", "Task"]
