"""Checks that losses, weights and averages are finite, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.optimization import Optimization
from uvit_decay.tasks.sharding import local_shard

NEVER = 2**62  # a step that is never reached


class LossGuard:
    """The first step of a run whose loss was not finite, recorded on the device without waiting for it."""

    def __init__(self) -> None:
        self.bad_step: Tensor | None = None  # NEVER if all losses were finite; None before the first step

    def record(self, loss: Tensor, step: int) -> None:
        """Note the step if its loss, a scalar, is not finite."""
        found = torch.where(~torch.isfinite(loss.detach()), step, NEVER)
        self.bad_step = found if self.bad_step is None else torch.minimum(self.bad_step, found)

    def raise_if_not_finite(self, task: LightningModule) -> None:
        """Raise a UserError if a loss since the start was NaN or infinite on any rank; all ranks must call this."""
        ours = torch.tensor(NEVER, device=task.device) if self.bad_step is None else self.bad_step
        step = int(task.trainer.strategy.reduce(ours, reduce_op="min"))
        if step < NEVER:
            rate = task.trainer.optimizers[0].param_groups[0]["lr"]
            raise UserError(f"the loss is not finite at step {step} (learning rate {rate:.3g}); {_advise(task.optim)}")


def check_finite(trainer: Trainer, tensors: Iterable[Tensor], what: str) -> None:
    """Raise a UserError on all ranks if a tensor of any rank holds NaN or infinity; all ranks must call this.

    Args:
        trainer: trainer of the run.
        tensors: tensors of this rank, which may be sharded.
        what: their name in the error, in the plural.
    """
    flags = [torch.isfinite(local_shard(tensor.detach())).all() for tensor in tensors]
    finite = torch.stack(flags).all()
    if trainer.strategy.reduce_boolean_decision(not finite, all=False):
        advice = _advise(trainer.lightning_module.optim)
        raise UserError(f"the {what} are not finite at step {trainer.global_step}; {advice}")


def _advise(optim: Optimization) -> str:
    return (
        f"the last good checkpoint is kept: lower {optim.lr_flag}, lengthen {optim.warmup_flag} "
        "or set --trainer.gradient_clip_val"
    )
