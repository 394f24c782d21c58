"""The learning-rate schedule over the optimizer steps of a run."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


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
