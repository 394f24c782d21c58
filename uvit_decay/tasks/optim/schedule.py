"""The learning rate over the optimizer steps of a run: its factor after the warm-up, and the scheduler."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch.optim.lr_scheduler import LambdaLR

Annealing = Literal["constant", "cosine", "wsd"]


def anneal(schedule: Annealing, step: float, total: float, cooldown: int | None, floor: float) -> float:
    """Return the factor of the learning rate at `step` of the `total` steps after the warm-up.

    Args:
        schedule: 1 throughout; half a cosine period from 1 to `floor`; or 1, then linear to `floor`.
        step: optimizer steps since the warm-up.
        total: optimizer steps from the warm-up to the end of the run.
        cooldown: length of the linear part of `wsd`, in optimizer steps.
        floor: the factor at the end.
    """
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        left = max(0.0, total - step)
        return floor + (1.0 - floor) * min(1.0, left / cooldown)
    progress = min(1.0, step / max(1, total))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * cosine


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
