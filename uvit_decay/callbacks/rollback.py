"""Going back to an earlier state when the loss spikes, and passing over the batches of the spike.

PaLM (Chowdhery et al. 2022, section 5.1) restarted from a checkpoint about 100 steps before a spike and skipped 200 to
500 batches, after which the loss did not spike there again. Here the step number goes on besides: batches and learning
rates stay functions of the step, as if the steps of the spike had been skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.tensor import DTensor

from uvit_decay.callbacks.ema import EMA
from uvit_decay.runtime.errors import UserError, check_whole, explained
from uvit_decay.runtime.plain import typed
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.sharding import gathered, like, local, local_values

LEAST = 5  # means that must be known before one is judged
KEPT = 2  # states
KEY = "rollback"  # in checkpoints
ANY = (AttributeError, KeyError, TypeError, ValueError, RuntimeError)  # of contents of any form
WITHOUT = "leave the callback out to go on without them"


@dataclass(frozen=True)
class State:
    """All that training changes, as it was after `step`: this rank's part, on the CPU."""

    step: int
    tensors: dict[str, Tensor]


class Rollback(Callback):
    """Goes back to an earlier state of the run when the loss spikes, and goes on with the next batches.

    Every N steps the mean loss of the last N, over all devices, is compared with the median of such means before. If it
    is no spike, the state is kept: weights, moments, averages and statistics of batch norms. If it is one, the older of
    the two states that are kept is restored, of 2 N steps ago, since the last one may be spoilt already. The step
    number goes on, and with it the batches, the learning rate and the ramp of the average. All ranks do the same.

    The two states take twice the room of a checkpoint in the memory of each process (of a shard where the network is
    sharded), and in every checkpoint, so that a resumed run does as the run that was not stopped. Every N steps the run
    waits for the device.

    Args:
        every_n_steps: N, optimizer steps.
        factor: a mean above `factor` times the median is a spike; above 1.
        window: number of means before it whose median is taken.
        times: how often a run may go back; the next spike stops it.

    Raises:
        UserError: an option out of range; while training, one spike too many.
    """

    def __init__(self, every_n_steps: int = 100, factor: float = 2.0, window: int = 20, times: int = 3) -> None:
        check_whole(1, every_n_steps=every_n_steps)
        check_whole(LEAST, window=window)
        check_whole(0, times=times)
        if not 1.0 < factor < math.inf:
            raise UserError(f"factor of Rollback must be above 1 and finite, got {factor}")
        self.every_n_steps, self.factor, self.window, self.times = every_n_steps, factor, window, times
        self.count = 0  # how often the run went back
        self.means: list[float] = []
        self.states: list[State] = []
        self._losses: list[Tensor] = []  # of this rank, since the last judgement or checkpoint
        self._known: list[float] = []  # finite means over the ranks of those before, since the last judgement
        self._seen_step = 0
        self._loaded: Any = None  # what the checkpoint has, until the run has its tensors

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        """Come after the EMA and before checkpoints, which shall hold what this callback leaves."""
        trainer.callbacks = sorted(trainer.callbacks, key=self._place)

    def _place(self, callback: Callback) -> int:
        return 1 if callback is self else 2 if isinstance(callback, Checkpoint) else 0

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._seen_step, self._losses = trainer.global_step, []
        if self._loaded is not None:
            with explained("the states that Rollback kept in the checkpoint are damaged", *ANY, hint=WITHOUT):
                self._load(_live(trainer, task))

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, *_: Any) -> None:
        self._losses.append(outputs["loss"].detach() * trainer.accumulate_grad_batches)  # Lightning has divided it
        step, before = trainer.global_step, self._seen_step
        self._seen_step = step
        if step == before or step % self.every_n_steps:  # gradients are being accumulated, or it is not yet time
            return
        task.raise_if_not_finite()
        mean = self._mean(trainer)
        if len(self.means) >= LEAST and not mean <= self.factor * median(self.means):
            self._go_back(trainer, task, mean)
        elif math.isfinite(mean):
            self.means = [*self.means, mean][-self.window :]
            task.settle()
            tensors = {name: local_values(value).to("cpu", copy=True) for name, value in _live(trainer, task).items()}
            self.states = [*self.states, State(step, tensors)][-KEPT:]

    def _flush(self, trainer: Trainer) -> None:
        """Average the losses over the ranks, all of which must call this."""
        if self._losses:
            losses = trainer.strategy.reduce(torch.stack(self._losses), reduce_op="mean").tolist()
            self._known += [loss for loss in losses if math.isfinite(loss)]
        self._losses = []

    def _mean(self, trainer: Trainer) -> float:
        """Return the mean of all finite losses since the last judgement, NaN without any."""
        self._flush(trainer)
        losses, self._known = self._known, []
        return math.fsum(losses) / len(losses) if losses else math.nan

    @torch.no_grad()
    def _go_back(self, trainer: Trainer, task: Task, mean: float) -> None:
        step, usual = trainer.global_step, median(self.means)
        spike = f"loss spike at step {step}: the mean of {self.every_n_steps} steps is {mean:.4g}, usual is {usual:.4g}"
        if self.count == self.times:
            raise UserError(
                f"{spike}; the run went back {self.count} times, as often as Rollback may: lower --model.optim.lr, set "
                "--trainer.gradient_clip_val or go on from an earlier checkpoint"
            )
        self.count += 1
        self.states = self.states[:1]
        for name, value in _live(trainer, task).items():
            local_values(value).copy_(self.states[0].tensors[name])
        rank_zero_info(
            f"{spike}; back to the weights of step {self.states[0].step}, without the batches since then "
            f"({self.count} of at most {self.times} times)"
        )
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({"train/rollbacks": float(self.count)}, step)

    def on_save_checkpoint(self, trainer: Trainer, task: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._flush(trainer)
        live = _live(trainer, task) if self.states else {}
        states = [
            {"step": state.step, "tensors": gathered({k: _like_live(live[k], v) for k, v in state.tensors.items()})}
            for state in self.states
        ]
        checkpoint[KEY] = {"count": self.count, "means": self.means, "losses": self._known, "states": states}

    def on_load_checkpoint(self, trainer: Trainer, task: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get(KEY)

    def _load(self, live: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint has; its states only if this run keeps the same averages."""
        stored, self._loaded = self._loaded, None
        numbers = {"count": stored["count"], "means": stored["means"], "losses": stored["losses"]}
        known = typed(_Numbers, numbers, "Rollback of the checkpoint")
        self.count, self.means, self._known = known.count, list(known.means), list(known.losses)
        self.states = []
        for state in stored["states"]:
            if state["tensors"].keys() != live.keys():
                rank_zero_info("Rollback keeps its states anew: this run has other averages than the checkpoint")
                return
            self.states.append(State(int(state["step"]), {k: _part(live[k], v) for k, v in state["tensors"].items()}))


@dataclass(frozen=True)
class _Numbers:
    """Numbers that a checkpoint has of Rollback besides the states."""

    count: int
    means: Sequence[float]
    losses: Sequence[float]

    def __post_init__(self) -> None:
        check_whole(0, count=self.count)


def _live(trainer: Trainer, task: LightningModule) -> dict[str, Tensor]:
    """Return by name the tensors that training changes, which share its memory; sharded ones are sharded."""
    optimizer = trainer.optimizers[0]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = {f"net.{name}": value for name, value in task.net.state_dict().items()}
    for i, p in enumerate(parameters):
        tensors |= {f"moments.{i}.{key}": value for key, value in optimizer.state.get(p, {}).items()}
    for callback in trainer.callbacks:
        for average in callback.averages if isinstance(callback, EMA) else ():
            tensors |= {f"averages.{average.decay}.{name}": value for name, value in average.shadow.items()}
    return tensors


def _like_live(live: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a sharded tensor where the live one is sharded."""
    if not isinstance(live, DTensor):
        return part
    shape = {"shape": live.shape, "stride": live.stride()}
    return DTensor.from_local(part.to(live.device), live.device_mesh, live.placements, run_check=False, **shape)


def _part(live: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of a full tensor of a checkpoint, on the CPU, if it could be the live one's."""
    if value.shape != live.shape or value.dtype != live.dtype or not torch.isfinite(value).all():
        raise ValueError(f"a tensor of shape {tuple(value.shape)} and {value.dtype} in place of {tuple(live.shape)}")
    return local(like(live, value)).to("cpu", copy=True)
