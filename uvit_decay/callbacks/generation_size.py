"""Sizes of generation metrics: how many reference images a run can afford for its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.periodic import TRAINING_COST
from uvit_decay.metrics import Extractor, TrainedExtractor
from uvit_decay.runtime.errors import one_line
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.utilisation import count_image_flops

REFERENCE_SHARE = 0.5  # of the network evaluations that all evaluations may cost, for reference and classifier
GPU_SPEED = 100  # FLOPs of a GPU in the time of one FLOP of a CPU core, on which classifiers are trained

Price = Callable[[int], float]  # cost of an image of a reference of this many images, in network evaluations


def find_price(extractor: Extractor, shape: tuple[int, ...], task: Task) -> Price:
    """Return the price of reference images, by their FLOPs; it is the same on all machines of a kind.

    Args:
        extractor: the extractor; one that is not trained must be prepared.
        shape: shape (c, h, w) of the images.
        task: the task, attached to its trainer.
    """
    try:
        network = count_image_flops(task) / TRAINING_COST
    except Exception as error:  # a network or a loss of the user's may raise anything
        reason = f"the FLOPs of {type(task.net).__name__} cannot be counted, {one_line(error)}"
        rank_zero_info(f"the reference is not sized to the run: {reason}")
        network = 0.0
    if not network:
        return lambda count: 0.0
    slower = GPU_SPEED if isinstance(extractor, TrainedExtractor) and task.device.type != "cpu" else 1
    device = torch.device("cpu") if isinstance(extractor, TrainedExtractor) else task.device
    return lambda count: slower * extractor.image_flops(shape, device, count) / network


def limit_reference(count: int, least: int, budget: float, price: Price) -> int:
    """Return `count`, halved until so many images cost at most `budget`, but not below `least`.

    Halvings let runs of similar lengths share a reference and its classifier.
    """
    while count > least and count * price(count) > budget:
        count = max(least, math.ceil(count / 2))
    return count
