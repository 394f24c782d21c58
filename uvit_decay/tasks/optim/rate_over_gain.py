"""Learning rates that make every branch of a decayed network move as in the plain network (`rate_over_gain`).

A decayed network is a plain one whose branch k is multiplied by its gain g = beta / P (docs/equivalence.md). Its
branch is proportional to the rows W of one layer: to its gate, if it has one, and otherwise to its last layer
(`DecayedNet.branch_factors`). So the plain network has the rows W' = g W, and the gradients are dL/dW = g dL/dW'. The
decayed network stays equal to the plain one, without weight decay, if each step of g W equals the step of W':

- **Adam, and Muon for a whole matrix**: a step does not depend on the scale of the gradient. The rate is lr / g.
- **SGD**, with or without momentum: a step is proportional to the gradient, which has the factor g: lr / g^2.
- **LARS**: no factor does this. The step of a matrix that is not 0 is proportional to its norm, which needs the factor
  1. The step of a bias, and the first step of a matrix that starts at 0, are steps of SGD, which need 1 / g^2.
- **Muon for a gate**: no factor does this. A gate is some rows of a matrix, and Muon orthogonalises the whole update.

A ResNet is refused: its classifier and its projections read the stream without a norm.

With weight decay, the rows shrink at the corrected rate too: by the factor 1 - rate * weight_decay in a step of AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uvit_decay.nn.base import DecayedNet
from uvit_decay.nn.resnet import ResNet
from uvit_decay.tasks.parallel.sharding import local_shard, shard_like
from uvit_decay.terminal.errors import UserError


@dataclass(frozen=True)
class RateFactors:
    """Factors of the learning rate, by the names of parameters.

    Args:
        of_parameters: numbers for whole parameters; other parameters have the factor 1.
        of_rows: float64 tensors (rows,) for parameters whose steps are multiplied by `RowSteps`.
    """

    of_parameters: dict[str, float] = field(default_factory=dict)
    of_rows: dict[str, Tensor] = field(default_factory=dict)


def rate_factors(net: nn.Module, power: int) -> RateFactors:
    """Return the factors gain^-power of the rows to which the branches of `net` are proportional."""
    if isinstance(net, ResNet):
        raise UserError("rate_over_gain is for transformers, not for a ResNet: set it to false")
    if not isinstance(net, DecayedNet) or not net.shortcuts.fixed:
        raise UserError(f"rate_over_gain: this {type(net).__name__} has no fixed shortcuts, set it to false")
    factors = RateFactors()
    for rows, gain in zip(net.branch_factors(), net.shortcuts.gains, strict=True):
        factor = 1 / gain**power
        for name in (f"{rows.module}.weight", f"{rows.module}.bias"):
            # A layer may serve several branches by parts of its rows, as SiT's modulation does.
            if rows.parts == 1:
                factors.of_parameters[name] = factor
                continue
            count = net.get_parameter(name).shape[0]
            of_rows = factors.of_rows.setdefault(name, torch.ones(count, dtype=torch.float64))
            each = count // rows.parts
            first = rows.part * each
            of_rows[first : first + each] = factor
    return factors


class ScaledRows(NamedTuple):
    """Rows of a parameter whose steps are multiplied."""

    parameter: Tensor  # may be sharded
    indices: Tensor  # of the rows in this rank's part, int64 (n,)
    factors: Tensor  # (n,) in the dtype of the parameter


class RowSteps:
    """Hooks of an optimizer that multiply the steps of some rows of its parameters.

    The parameters of a group have one rate, and a tensor is in one group. So these rows are set to
    before + factor * (after - before) after each step of the optimizer. In AdamW and SGD the step of each number is
    proportional to the rate, weight decay included. The rows therefore move as in a group with the rate factor * lr, up
    to the rounding of the parameter's dtype. The moments do not depend on the rate and stay in one tensor, so that
    checkpoints have the same form as without these hooks.

    Args:
        optimizer: the optimizer.
        factors: pairs of a parameter, which may be sharded, and the factors of its rows, (rows,).
    """

    def __init__(self, optimizer: Optimizer, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.rows: list[ScaledRows] = []
        self.before: list[Tensor] = []  # the rows before the present step
        for parameter, of_rows in factors:
            ours = local_shard(shard_like(parameter, of_rows.to(parameter.dtype)))
            indices = (ours != 1.0).nonzero().flatten()
            self.rows.append(ScaledRows(parameter, indices, ours[indices]))
        optimizer.register_step_pre_hook(self.keep)
        optimizer.register_step_post_hook(self.scale)

    def keep(self, *_: Any) -> None:
        """Copy the rows before a step."""
        self.before = []
        for rows in self.rows:
            part = local_shard(rows.parameter.detach())
            self.before.append(part.index_select(0, rows.indices))

    def scale(self, *_: Any) -> None:
        """Multiply the step of the rows after a step."""
        for rows, before in zip(self.rows, self.before, strict=True):
            part = local_shard(rows.parameter.detach())
            after = part.index_select(0, rows.indices)
            factors = rows.factors.view(-1, *[1] * (part.dim() - 1))
            part.index_copy_(0, rows.indices, torch.lerp(before, after, factors))
        self.before = []
