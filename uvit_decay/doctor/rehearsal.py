"""A few real steps of a run, timed and thrown away: what a step takes in time and memory, and each callback's cost."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar, Timer

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.callbacks.run_log import Summary
from uvit_decay.doctor.environment import memory_limit, missing_weights
from uvit_decay.doctor.report import Finding, Run, duration
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import subset
from uvit_decay.tasks import Task
from uvit_decay.tasks.optimization import run_length
from uvit_decay.tasks.utilisation import peak_bytes

WARM = 2  # optimizer steps before the clock starts
STEPS, SECONDS = 20, 5.0  # of timed steps: whichever comes last ends them
MOST = 60.0  # seconds of all steps
Practice = Callable[[list[Callback]], Trainer]  # makes a trainer that writes nothing
FORWARD = 1 / 3  # time of an image without a backward pass, against that of training


@dataclass
class Measured:
    """Findings of the rehearsal."""

    limit: int = 0  # bytes of the device, or of main memory
    peak: int = 0  # most bytes that a process held
    step: float = 0.0  # seconds of an optimizer step
    counted: float = 0.0  # optimizer steps that were timed
    micro_batches: int = 1  # of a step on a device
    images: int = 0  # of each
    epoch: int = 0  # optimizer steps of an epoch
    total: float = math.inf  # optimizer steps of the run
    evaluating: float = 0.0  # seconds of all evaluations of callbacks
    callbacks: list[Finding] = field(default_factory=list)  # one for each that evaluates


class Rehearsal(Callback):
    """Times the first steps of a fit and stops it; costs the periodic callbacks of the `run` at the end."""

    def __init__(self, run: Run, failed: bool = False) -> None:
        self.run, self.failed, self.found = run, failed, Measured(limit=memory_limit(run.trainer.strategy.root_device))
        self._begun = self._start = 0.0

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """End a rank that has found an error; compare the images of the others."""
        if self.failed:
            raise UserError("this process has found an error")
        data = trainer.datamodule
        few = data.train[subset(data.train, COMPARED, "compared")][0].tolist()
        Processes.current().check_same(f"images of {data.name}", [len(data.train), data.class_names, few])

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self._begun, found, data = time.perf_counter(), self.found, trainer.datamodule
        found.epoch, found.total = run_length(trainer)
        found.micro_batches = data.micro_batches
        found.images = data.batch_size // (trainer.world_size * data.micro_batches)
        if task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(task.device)

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        """Start the clock after the warm-up, stop the fit when enough is timed; all ranks decide alike."""
        now = self._now(task)
        waited = now - self._begun
        if not self._start:
            if trainer.global_step >= WARM or waited > MOST / 2:
                self._start = now
            return
        found, spent = self.found, now - self._start
        found.counted += 1 / found.micro_batches
        found.step = spent / found.counted
        enough = found.counted >= STEPS and spent > SECONDS
        trainer.should_stop |= trainer.strategy.reduce_boolean_decision(enough or waited > MOST, all=False)

    def _now(self, task: Task) -> float:
        if task.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self.found.peak = peak_bytes(task.device)
        self.found.callbacks = [self._cost(trainer, task, callback) for callback in self.run.periodic]

    def _cost(self, trainer: Trainer, task: Task, callback: Periodic) -> Finding:
        """Return the cost of a callback by its forward passes; it is checked if all weights that it needs are here."""
        name, times = type(callback).__name__, self._times(callback)
        try:
            if not missing_weights(callback, trainer.datamodule):
                callback.setup(trainer, task, "fit")
                callback.ready(trainer, task)
            evaluations = callback.evaluations(trainer, task)
        except UserError as error:
            return Finding("error", name, str(error))
        seconds = evaluations * FORWARD * self.found.step / trainer.datamodule.batch_size
        self.found.evaluating += times * seconds
        return Finding("ok", name, f"{times} x {evaluations} network evaluations, about {duration(seconds)} each time")

    def _times(self, callback: Periodic) -> int:
        """Return how often the callback runs until the end of the run; 0 if that has none."""
        if math.isinf(self.found.total):
            return 0
        first, last, epoch = self.run.begun, int(self.found.total), self.found.epoch * (callback.every_n_epochs or 0)
        steps = {step for n in (callback.every_n_steps, epoch) if n for step in range(n, last + 1, n) if step > first}
        return len(steps | ({last} if callback.at_end and last > first else set()))


def rehearse(run: Run, practice: Practice, failed: bool = False) -> Measured:
    """Train for a few steps with the callbacks that neither evaluate nor write, and return what they cost.

    Args:
        run: the run.
        practice: returns a trainer as that of the run, with other callbacks, that keeps nothing.
        failed: this rank has found an error: it ends when the other ranks have come, and they with it.
    """
    left_out = (Periodic, Checkpoint, Summary, ModelSummary, ProgressBar, Timer)
    rehearsal = Rehearsal(run, failed)
    trainer = practice([*(own for own in run.trainer.callbacks if not isinstance(own, left_out)), rehearsal])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loader, a logger or a limit that the run will not have
        trainer.fit(run.task, run.data)
    return rehearsal.found
