"""Training steps that change nothing because their loss or gradient is not finite, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import AdamW, Optimizer

from uvit_decay.tasks.sharding import local_values

KEY = "skipped_steps"  # in checkpoints
LOGGED = "train/skipped_steps"


class Skips:
    """Count and undo steps whose loss or gradient norm is not finite, on all ranks alike.

    A skipped step leaves weights, moments, averages and statistics of batch norms as they were before it. It counts as
    a step: the next one trains on the next batch at the next learning rate.

    In a step: `begin` before the first piece, `spread` on the loss of each piece, `judge` once the gradient is whole,
    and `end` after the optimizer's step.

    Args:
        most: number of steps that may be skipped in a run; with 0 none is.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count: int | Tensor = 0  # of skipped steps, on the device
        self.now: Tensor | None = None  # whether the last step was skipped: a bool on the device
        self.logged = (LOGGED,) if most else ()
        self._before: list[tuple[Tensor, Tensor]] = []

    def begin(self, net: nn.Module, optimizer: Optimizer) -> None:
        """Copy what a step will change; not the weights and moments of AdamW, whose kernel can skip a step."""
        if not self.most:
            return
        changed = [buffer for part in net.modules() if isinstance(part, _BatchNorm) for buffer in part.buffers()]
        if not isinstance(optimizer, AdamW):
            changed += [*net.parameters(), *_moments(optimizer)]
        self._before = [(tensor, local_values(tensor).clone()) for tensor in changed]

    def spread(self, loss: Tensor) -> Tensor:
        """Return the loss; if it is not finite, NaN with a gradient of NaN, which all ranks get when they average."""
        if not self.most:
            return loss
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def judge(self, norm: Tensor, optimizer: Optimizer) -> Tensor:
        """Skip this step if the gradient norm, the same on all ranks, is not finite.

        Returns:
            whether it is one step too many, as a bool on the device.
        """
        self.now = ~torch.isfinite(norm)
        self.count = self.count + self.now
        if isinstance(optimizer, AdamW):
            optimizer.found_inf = self.now.float()  # torch's own switch, made for float16
        return self.now & (self.count > self.most)

    def end(self, optimizer: Optimizer) -> None:
        """Restore the copies if the step is skipped; moments that it has made become zero."""
        before, self._before = self._before, []
        if self.most and not isinstance(optimizer, AdamW):
            known = {id(tensor) for tensor, _ in before}
            made = [tensor for tensor in _moments(optimizer) if id(tensor) not in known]
            before += [(tensor, torch.zeros_like(local_values(tensor))) for tensor in made]
        for tensor, value in before:
            local_values(tensor).copy_(torch.where(self.now, value, local_values(tensor)))

    def named(self) -> tuple[str, str]:
        """Return what is not finite at the step that stops the run, and after how many skipped steps."""
        return ("loss or its gradient", f", after {self.most} skipped steps") if self.most else ("loss", "")

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Store the count in a checkpoint, if steps may be skipped."""
        if self.most:
            checkpoint[KEY] = int(self.count)

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue the count of a checkpoint."""
        self.count = checkpoint.get(KEY, 0)


def _moments(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
