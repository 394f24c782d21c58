"""A few real steps of a run, timed and thrown away: what a step takes in time and memory, and each callback's cost.

The network is estimated on the meta device first. A step that is larger than the device, or that would take minutes on
it, is not tried, and its cost is the estimate.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar, Timer
from torch import Tensor

from uvit_decay.callbacks.ema import averaged
from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.callbacks.run_log import Summary
from uvit_decay.preflight.environment import memory_limit
from uvit_decay.preflight.plan import Run
from uvit_decay.preflight.space import missing_weights, state_bytes
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.flops import matrix_rate, peak_bytes
from uvit_decay.runtime.random import subset
from uvit_decay.tasks import Task
from uvit_decay.tasks.optimization import run_length
from uvit_decay.tasks.sharding import Sharded
from uvit_decay.tasks.utilisation import image_flops, piece, stand_in

WARM = 2  # optimizer steps before the clock starts
STEPS, SECONDS = 20, 5.0  # of timed steps: whichever comes last ends them
MOST = 60.0  # seconds of all steps
LONGEST = 60.0  # seconds of one piece, by its FLOPs, beyond which none is tried


class NotTried(Exception):
    """A step is too large or too long to be tried on this machine."""


@dataclass
class Cost:
    """Cost of a callback each time.

    Args:
        name: its class.
        evaluations: network evaluations, each image counted, over all ranks.
        seconds: of one time.
        times: how often it runs.
        error: why it cannot run.
    """

    name: str
    evaluations: int = 0
    seconds: float = 0.0
    times: int = 0
    error: str = ""


@dataclass
class Measured:
    """Findings of the rehearsal; `tried` is False if time and memory are estimates.

    Args:
        limit: bytes of the device, or of main memory.
        estimate: bytes of weights, gradients, optimizer, averages and activations, by the shapes.
        peak: most bytes that a process held.
        step: seconds of an optimizer step.
        counted: optimizer steps that were timed, at least 1.
        pieces: forward passes of a step on a device.
        images: images of each.
        epoch: optimizer steps of an epoch.
        total: optimizer steps of the run; infinite without an end.
        costs: of the callbacks.
    """

    limit: int = 0
    estimate: int = 0
    peak: int = 0
    step: float = 0.0
    counted: float = 0.0
    pieces: int = 1
    images: int = 0
    epoch: int = 0
    total: float = math.inf
    tried: bool = False
    costs: list[Cost] = field(default_factory=list)


class Rehearsal(Callback):
    """Times the first steps of a fit and stops it; costs the periodic callbacks of the `run` at the end.

    Args:
        run: the run.
        failed: this rank has found an error: it ends when the other ranks have come, and they with it.
    """

    def __init__(self, run: Run, failed: bool = False) -> None:
        self.run, self.failed, self.found = run, failed, Measured(limit=memory_limit(run.trainer.strategy.root_device))
        self._begun = self._start = 0.0
        self._timed = 0  # pieces since `_start`
        self._forward = 0.0  # seconds of an evaluation of an image by its FLOPs

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """End a rank that has found an error; compare the images of the others."""
        if self.failed:
            raise UserError("this process has found an error")
        data = trainer.datamodule
        few = data.train[subset(data.train, COMPARED, "compared")][0].tolist()
        Processes.current().check_same(f"images of {data.name}", [len(data.train), data.class_names, few])

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Estimate memory and time; raise NotTried on all ranks if one of them has not enough."""
        found, data = self.found, trainer.datamodule
        found.epoch, found.total = run_length(trainer)
        found.pieces, found.images = data.pieces, data.batch_size // (trainer.world_size * data.pieces)
        shards = trainer.world_size if isinstance(trainer.strategy, Sharded) else 1
        found.estimate = state_bytes(task, trainer.callbacks) // shards + activation_bytes(task)
        dtype = torch.bfloat16 if trainer.precision == "bf16-mixed" else torch.float32
        seconds = image_flops(task) / matrix_rate(task.device, dtype)
        self._forward, found.step = seconds / 3, seconds * found.images * found.pieces
        beyond = found.estimate * _on_one_device(trainer) > found.limit or seconds * found.images > LONGEST
        if trainer.strategy.reduce_boolean_decision(beyond, all=False):
            with averaged(trainer, task):
                found.costs = [self._estimated(trainer, task, callback) for callback in self.run.periodic]
            raise NotTried
        if task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(task.device)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        """Start the clock after the warm-up, stop the fit when enough is timed; all ranks decide alike."""
        now = self._now(task)
        waited = now - self._begun
        if not self._start:
            if trainer.global_step >= WARM or waited > MOST / 2:
                self._start = now
            return
        self._timed += 1
        steps, spent = self._timed / self.found.pieces, now - self._start
        enough = steps >= STEPS and spent > SECONDS
        if trainer.strategy.reduce_boolean_decision(enough or waited > MOST, all=False):
            self.found.step, self.found.counted = spent / steps, steps
            trainer.should_stop = True

    def _now(self, task: Task) -> float:
        if task.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        found = self.found
        if not found.counted and self._timed:  # the run is as short as its rehearsal
            found.counted = self._timed / found.pieces
            found.step = (self._now(task) - self._start) / found.counted
        found.peak, found.tried = peak_bytes(task.device), found.counted > 0
        found.costs = [self._cost(trainer, task, callback) for callback in self.run.periodic]

    def _cost(self, trainer: Trainer, task: Task, callback: Periodic) -> Cost:
        """Return the measured cost of a callback; by its FLOPs if weights that it needs are not here."""
        if missing_weights(callback, trainer.datamodule):
            return self._estimated(trainer, task, callback)
        cost = Cost(type(callback).__name__, times=self._times(callback))
        try:
            callback.setup(trainer, task, "fit")
            callback.ready(trainer, task)
            with averaged(trainer, task):
                cost.evaluations, cost.seconds = callback.evaluations(trainer, task), callback.seconds(trainer, task)
        except UserError as error:
            cost.error = str(error)
        return cost

    def _estimated(self, trainer: Trainer, task: Task, callback: Periodic) -> Cost:
        evaluations = callback.evaluations(trainer, task)
        seconds = evaluations * self._forward / trainer.world_size
        return Cost(type(callback).__name__, evaluations, seconds, self._times(callback))

    def _times(self, callback: Periodic) -> int:
        """Return how often the callback runs until the end of the run; 0 if that has none."""
        if math.isinf(self.found.total):
            return 0
        first, last, epoch = self.run.begun, int(self.found.total), self.found.epoch * (callback.every_n_epochs or 0)
        steps = {step for n in (callback.every_n_steps, epoch) if n for step in range(n, last + 1, n) if step > first}
        return len(steps | ({last} if callback.at_end and last > first else set()))


def _on_one_device(trainer: Trainer) -> int:
    """Return how many processes share the memory of the first one's device."""
    return trainer.num_devices if trainer.strategy.root_device.type == "cpu" else 1


def activation_bytes(task: Task) -> int:
    """Return the bytes of what the backward pass of a piece keeps, in float32; weights are not counted."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        alive.append(tensor)  # or another tensor would get its place
        return tensor

    with stand_in(task), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss(piece(task), "train")
        weights = {parameter.untyped_storage()._cdata for parameter in task.net.parameters()}
    return sum(size for place, size in kept.items() if place not in weights)


def rehearsed(trainer: Trainer) -> list[Callback]:
    """Return the callbacks that take part: those that neither evaluate nor write."""
    left_out = (Periodic, Checkpoint, Summary, ModelSummary, ProgressBar, Timer)
    return [callback for callback in trainer.callbacks if not isinstance(callback, left_out)]


def rehearse(run: Run, trainer: Trainer, rehearsal: Rehearsal) -> Measured:
    """Train for a few steps by `trainer`, which has no logger, and return what they cost."""
    run.task.init_from = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loader, a logger or a limit that the run will not have
        try:
            trainer.fit(run.task, run.data)
        except NotTried:
            rehearsal.found.tried = False
    return rehearsal.found
