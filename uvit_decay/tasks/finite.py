"""Checks that losses, weights and averages are finite, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from uvit_decay.tasks.optim.options import Optimization
from uvit_decay.tasks.parallel.sharding import local_shard
from uvit_decay.terminal.errors import UserError

NEVER = 2**62  # a step that is never reached
KEPT = "the last good checkpoint is kept"


class LossGuard:
    """The first steps of a run whose loss or images were not finite, recorded on the device without waiting for it.

    Attributes:
        bad_step: first step with a loss that is not finite; NEVER if there is none, None before the first step.
        bad_images: first step with images that are not finite, likewise.
    """

    def __init__(self) -> None:
        self.bad_step: Tensor | None = None
        self.bad_images: Tensor | None = None

    def record(self, loss: Tensor, images: Tensor, step: int, scaled: bool = False) -> None:
        """Note the step if its loss, a scalar, or its images are not finite.

        `scaled` notes only images: a gradient scaler skips a step whose loss is not finite.
        """
        self.bad_images = _note(self.bad_images, images, step)
        self.bad_step = self.bad_images if scaled else _note(self.bad_step, loss, step)

    def raise_if_not_finite(self, task: LightningModule) -> None:
        """Raise a UserError if a loss since the start was NaN or infinite on any rank; all ranks must call this."""
        step = _find_first(self.bad_step, task)
        if step == NEVER:
            return
        problem = f"the loss is not finite at step {step}"
        if _find_first(self.bad_images, task) == step:
            raise UserError(f"{problem}, because its images hold NaN or infinity; {KEPT}: repair the data")
        rate = task.trainer.optimizers[0].param_groups[0]["lr"]
        raise UserError(f"{problem} (learning rate {rate:.3g}); {_advise(task.optim)}")


def _note(first: Tensor | None, values: Tensor, step: int) -> Tensor:
    """Return the first step with values that are not finite, given the one so far and the values of this step."""
    found = torch.where(torch.isfinite(values.detach()).all(), NEVER, step)
    return found if first is None else torch.minimum(first, found)


def _find_first(step: Tensor | None, task: LightningModule) -> int:
    """Return the least of a step that each rank has noted, NEVER where it is None; all ranks must call this."""
    ours = torch.tensor(NEVER, device=task.device) if step is None else step
    return int(task.trainer.strategy.reduce(ours, reduce_op="min"))


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
    rate, warmup = optim.used_name("lr"), optim.used_name("warmup_steps")
    return f"{KEPT}: lower `{rate}`, lengthen `{warmup}` or set `gradient_clip_val`"
