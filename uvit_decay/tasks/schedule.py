"""The length of a run in optimizer steps, and the learning-rate schedule over them."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import LambdaLR


def run_length(trainer: Trainer) -> tuple[int, float]:
    """Return the optimizer steps of an epoch and of the whole run, which may be infinite.

    Lightning's `estimated_stepping_batches` sets up the loader, and a resumed run would then not move it to the
    place of its checkpoint. No loader is made here, which could move images to a GPU once more.
    """
    batches = trainer.datamodule.count_train_batches()
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    total: float = math.inf
    if trainer.max_epochs not in (None, -1):
        total = epoch * max(trainer.max_epochs, 1)
    if trainer.max_steps != -1:
        total = min(total, trainer.max_steps)
    return epoch, total


class Schedule(LambdaLR):
    """A LambdaLR that restores only the step of a checkpoint; the learning rate follows from this run's settings."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        step = state_dict["last_epoch"]
        rates = []
        for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            rate = base * factor(step)
            group["lr"] = rate
            rates.append(rate)
        state = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": [None] * len(rates)}
        super().load_state_dict(state)
