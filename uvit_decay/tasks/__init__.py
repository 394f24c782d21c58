"""LightningModules that join a network and data for training."""

from uvit_decay.tasks.auxiliary import AuxiliaryLoss
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.classify import ClassifyTask
from uvit_decay.tasks.diffusion import DiffusionTask
from uvit_decay.tasks.mae import MAETask
from uvit_decay.tasks.optimization import Optimization

__all__ = ["AuxiliaryLoss", "ClassifyTask", "DiffusionTask", "MAETask", "Optimization", "Task"]
