"""A rehearsal of a run: time and memory of a few real steps, which are not kept, and the cost of each callback."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar, Timer
from lightning.pytorch.cli import SaveConfigCallback
from torch import Tensor
from torch.optim import Optimizer

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.callbacks.summary import Summary
from uvit_decay.doctor.environment import find_missing_weights, memory_limit
from uvit_decay.doctor.report import Finding, Plan
from uvit_decay.runs.restore import run_length
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.random import subset
from uvit_decay.tasks import Task
from uvit_decay.tasks.utilisation import peak_bytes
from uvit_decay.terminal.errors import UserError, explain, with_flags

WARM = 2  # optimizer steps before the clock starts
STEPS, SECONDS = 20, 5.0  # least number and least time of the timed steps
MOST = 60.0  # seconds of all steps
# Settings of the trainer of a rehearsal, which writes nothing, validates nothing, and ends when it has seen enough.
PRACTICE = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "min_steps": None,
    "min_epochs": None,
    "max_time": None,
    "profiler": None,
    "fast_dev_run": False,
}
Practice = Callable[[list[Callback]], Trainer]  # function callbacks -> trainer that writes nothing
Copied = TypeVar("Copied")


@dataclass
class Measurements:
    """Results of the rehearsal."""

    limit: int = 0  # bytes of the device, or of main memory
    peak: int = 0  # peak memory of a process in bytes
    moments: int = 0  # bytes of the optimizer's state, of all shards
    step: float = 0.0  # seconds of an optimizer step
    counted: float = 0.0  # optimizer steps that were timed
    micro_batches: int = 1  # of a step on a device
    images: int = 0  # of a micro-batch
    epoch: int = 0  # optimizer steps of an epoch
    total: float = math.inf  # optimizer steps of the run
    evaluations: dict[Periodic, int] = field(default_factory=dict)  # network evaluations of one `evaluate`
    callbacks: list[Finding] = field(default_factory=list)  # of those that fail or are left out


class Rehearsal(Callback):
    """Times the first steps of a fit and stops it; then counts the network evaluations of the periodic callbacks.

    Args:
        run: the run.
        failed: whether this rank has found an error: it fails when the other ranks have come, and they fail with it.
        most: seconds of all steps; one is made in any case.
    """

    def __init__(self, run: Plan, failed: bool = False, most: float = MOST) -> None:
        self.run = run
        self.most = most
        self.failed = failed
        self.found = Measurements(limit=memory_limit(run.trainer.strategy.root_device))
        self._begun = 0.0  # time of the first step
        self._start = 0.0  # time of the first timed step; 0 in the warm-up

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Raise a UserError if this rank has found an error, or if the images of the ranks differ."""
        if self.failed:
            raise UserError("this process has found an error")
        data = trainer.datamodule
        few = data.train[subset(data.train, COMPARED, "compared")]
        content = [len(data.train), data.class_names, few[0].tolist()]
        Processes.current().check_same(f"images of {data.name}", content)

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self._begun = time.perf_counter()
        found = self.found
        data = trainer.datamodule
        found.epoch, found.total = run_length(trainer)
        found.micro_batches = data.micro_batches
        found.images = data.batch_size // (trainer.world_size * data.micro_batches)
        if task.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(task.device)

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        """Start the clock after the warm-up, and stop the fit after enough timed steps; all ranks decide together."""
        if task.device.type != "cpu":
            torch.accelerator.synchronize()  # the device has finished its work
        now = time.perf_counter()
        waited = now - self._begun
        if not self._start:
            if trainer.global_step >= WARM or waited > self.most / 2:
                self._start = now
            return
        found = self.found
        spent = now - self._start
        found.counted += 1 / found.micro_batches
        found.step = spent / found.counted
        enough = found.counted >= STEPS and spent > SECONDS
        # The memory and the size of a checkpoint are known only after a step of the optimizer.
        late = waited > self.most and trainer.global_step > 0
        trainer.should_stop |= trainer.strategy.reduce_boolean_decision(enough or late, all=False)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self.found.peak = peak_bytes(task.device)
        self.found.moments = state_bytes(trainer.optimizers[0])
        for callback in self.run.periodic:
            self._examine_callback(trainer, task, callback)

    def _examine_callback(self, trainer: Trainer, task: Task, callback: Periodic) -> None:
        """Count the network evaluations of a callback; check it if all weights that it needs are on this machine."""
        name = type(callback).__name__
        try:
            if not find_missing_weights(callback, trainer.datamodule):
                callback.setup(trainer, task, "fit")
                callback.prepare(trainer, task)
            if callback.left_out is None:
                self.found.evaluations[callback] = callback.evaluations(trainer, task)
            else:
                self.found.callbacks.append(Finding("warning", name, with_flags(f"left out: {callback.left_out}")))
        except UserError as error:
            self.found.callbacks.append(Finding("error", name, with_flags(error)))


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors that an optimizer keeps after a step; the tensors of shards count as a whole."""
    count = 0
    for state in optimizer.state.values():
        count += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return count


def copy_for_practice(part: Copied) -> Copied:
    """Return a copy of a callback or a task, which a rehearsal may change; an open file cannot be copied."""
    with explain(f"cannot measure the run beforehand, {type(part).__name__} cannot be copied", TypeError, RuntimeError):
        return copy.deepcopy(part)


def rehearse(run: Plan, practice: Practice, rehearsal: Rehearsal) -> Measurements:
    """Train for a few steps with copies of the callbacks that neither evaluate nor write, and return the cost.

    Args:
        run: the run.
        practice: function callbacks -> trainer, which equals the run's trainer but has these callbacks and writes
            nothing.
        rehearsal: measures the cost.
    """
    left_out = (Periodic, Checkpoint, Summary, SaveConfigCallback, ModelSummary, ProgressBar, Timer)
    callbacks = []
    for callback in run.trainer.callbacks:
        if not isinstance(callback, left_out):
            callbacks.append(copy_for_practice(callback))
    trainer = practice([*callbacks, rehearsal])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a loader, a logger or a limit that the run will not have
        trainer.fit(run.task, run.data)
    return rehearsal.found
