"""Training steps that go wrong: a callback that spoils chosen steps, and what a run holds after each step."""

import math

import torch
from lightning.pytorch import Callback

from uvit_decay.callbacks import EMA
from uvit_decay.tasks.sharding import full

PIECE = 1  # which piece of a step is spoilt, if there are several


class Spoil(Callback):
    """Spoils steps on one rank: the images, the loss alone (its gradient stays finite) or the gradient alone."""

    def __init__(self, steps: dict[int, str], rank: int = 0) -> None:
        self.steps, self.rank = steps, rank

    def setup(self, trainer, task, stage) -> None:
        loss = task.loss
        task.loss = lambda batch, kind: loss(batch, kind) + (math.inf if self._now(trainer, "loss") else 0.0)

    def _now(self, trainer, kind) -> bool:
        piece = trainer.fit_loop.epoch_loop.batch_progress.current.started % trainer.accumulate_grad_batches
        here = trainer.global_rank == self.rank and piece == PIECE % trainer.accumulate_grad_batches
        return here and self.steps.get(trainer.global_step) == kind

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        spoilt = trainer.global_rank == self.rank and self.steps.get(trainer.global_step) == "images"
        if spoilt and batch_idx % trainer.accumulate_grad_batches == PIECE % trainer.accumulate_grad_batches:
            batch.images.fill_(math.nan)

    def on_after_backward(self, trainer, task) -> None:
        if self._now(trainer, "gradient"):
            grad = next(p.grad for p in task.net.parameters() if p.grad is not None)
            grad.view(-1)[0] = math.inf


class States(Callback):
    """Weights, buffers, moments, averages and learning rate after each step, and the number of skipped ones."""

    def __init__(self) -> None:
        self.after: list[dict[str, torch.Tensor]] = []
        self.rates: list[float] = []
        self.skipped: list[int] = []

    def on_train_batch_end(self, trainer, task, *_) -> None:
        if trainer.global_step == len(self.after):
            return
        values = dict(task.net.state_dict())
        for i, state in enumerate(trainer.optimizers[0].state.values()):
            values |= {f"moments.{i}.{name}": value for name, value in state.items()}
        for ema in (callback for callback in trainer.callbacks if isinstance(callback, EMA)):
            values |= {f"average.{name}": value for name, value in ema.shadow.items()}
        self.after.append({name: full(value.detach()).clone() for name, value in values.items()})
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.skipped.append(int(task.skips.count))
