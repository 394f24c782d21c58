"""LightningModules that join a network and data for training, and auxiliary losses for them."""

from uvit_decay.tasks.auxiliary import AuxiliaryLoss
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.classify import ClassifyTask
from uvit_decay.tasks.diffusion import DiffusionTask
from uvit_decay.tasks.dispersive import DispersiveLoss
from uvit_decay.tasks.layersync import LayerSync
from uvit_decay.tasks.mae import MAETask
from uvit_decay.tasks.optimization import Optimization
from uvit_decay.tasks.repa import REPA

__all__ = [
    "REPA",
    "AuxiliaryLoss",
    "ClassifyTask",
    "DiffusionTask",
    "DispersiveLoss",
    "LayerSync",
    "MAETask",
    "Optimization",
    "Task",
]
