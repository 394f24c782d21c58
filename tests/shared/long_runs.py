"""Small runs of what keeps long runs alive, and what goes wrong in them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import Losses, tiny_net, tiny_task, tiny_trainer
from lightning.pytorch import Callback
from small_vit import PROBE, linear_probe
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from uvit_decay.callbacks import EMA
from uvit_decay.data import Digits
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks import DiffusionTask
from uvit_decay.tasks.base import Optimization
from uvit_decay.tasks.sharding import full

CLIP = {"norm": (clip_grad_norm_, 0.05), "value": (clip_grad_value_, 1e-3)}
STEPS = 4


def clipped(folder, algorithm, *callbacks, **options):
    task = tiny_task(tiny_net(schedule="learnable"))
    options |= {"gradient_clip_val": CLIP[algorithm][1], "gradient_clip_algorithm": algorithm}
    trainer = tiny_trainer(folder, *callbacks, max_steps=STEPS, log_every_n_steps=1, **options)
    trainer.fit(task, Digits(32))
    return task, trainer


PIECE = 1  # which piece of a step is spoilt, if there are several


class Spoil(Callback):
    """Spoils steps, counted from 0, on one rank.

    Ways: `images` of NaN; the `loss` alone is infinite, and its gradient finite; the `gradient` alone.
    """

    def __init__(self, steps: dict[int, str], rank: int = 0) -> None:
        self.steps, self.rank = steps, rank

    def _now(self, trainer, kind) -> bool:
        piece = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        here = trainer.global_rank == self.rank and piece == PIECE % trainer.accumulate_grad_batches
        return here and self.steps.get(trainer.global_step) == kind

    def setup(self, trainer, task, stage) -> None:
        loss = task.loss

        def spoilt(batch, kind):
            return loss(batch, kind) + (math.inf if self._now(trainer, "loss") else 0.0)

        task.loss = spoilt

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        if self._now(trainer, "images"):
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


MOST = 3
ADAMW = Optimization(1e-3, (0.9, 0.99), 0.03, warmup_steps=10, skip_non_finite=MOST)
TASKS = {
    "adamw": lambda optim=ADAMW: DiffusionTask(tiny_net(), optim=optim),
    "sgd": lambda: DiffusionTask(tiny_net(), optim=replace(ADAMW, optimizer="sgd")),
    "lars and a batch norm": lambda: linear_probe(optim=replace(PROBE, skip_non_finite=MOST)),
}


def trained(folder, task, *callbacks, max_steps=6, pieces=1, ckpt_path=None, **options):
    """Losses of the pieces and what the run held after each step."""
    states, losses, data = States(), Losses(), Digits(32, device_batch_size=32 // pieces)
    averages = [] if "linear_head.0" in dict(task.net.named_modules()) else [EMA(0.9)]
    trainer = tiny_trainer(folder, *callbacks, *averages, losses, states, max_steps=max_steps, **options)
    trainer.fit(task, data, ckpt_path=ckpt_path)
    return losses.values, states, trainer


def changed(states, step):
    """Names of what differs after a step, counted from 0, from before it; new moments from zero."""
    after = states.after[step]
    before = states.after[step - 1] if step else {**after, **dict.fromkeys(after, torch.tensor(0.0))}
    return {name for name, value in after.items() if not torch.equal(value, before[name].expand_as(value))}


TOO_MUCH = 2**46  # numbers


def allocate(*_) -> None:
    """Ask for memory that no machine has."""
    torch.empty(TOO_MUCH)


class Exhaust(Callback):
    """Lets step 2 run out of memory, in the forward or backward pass or in the optimizer, on one rank."""

    def __init__(self, where: str, rank: int = 0) -> None:
        self.where, self.rank = where, rank

    def on_train_batch_start(self, trainer, task, *_) -> None:
        if trainer.global_step != 2 or trainer.global_rank != self.rank:
            return
        if self.where == "forward":
            task.net.register_forward_hook(allocate)
        elif self.where == "backward":
            next(task.net.parameters()).register_hook(allocate)
        else:
            trainer.optimizers[0].register_step_post_hook(allocate)


def ended(folder, task, where="forward", batch_size=32, device_batch_size=None, rank=0, **options) -> str:
    """The error of a run that runs out of memory."""
    trainer = tiny_trainer(folder, Exhaust(where, rank), max_steps=4, **options)
    with pytest.raises((UserError, RuntimeError)) as error:
        trainer.fit(task, Digits(batch_size, device_batch_size))
    return str(error.value)


def leaves(tree, name=""):
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{name}.{key}")
    else:
        yield name, tree
