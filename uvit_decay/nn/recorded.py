"""Comparison of the weights of shortcuts and long skips in a state_dict with the network that loads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uvit_decay.terminal.errors import UserError


def agree(value: Tensor, expected: Sequence[float] | Sequence[Sequence[float]]) -> bool:
    """Return whether stored weights have the shape of `expected` and, up to rounding, its numbers.

    Weights are recorded in float32, and perhaps converted with the whole network later.
    """
    rounding = torch.finfo(torch.float32).eps
    if value.is_floating_point():
        rounding = max(rounding, torch.finfo(value.dtype).eps)
    wanted = torch.tensor(expected, dtype=torch.float64, device="cpu")
    stored = value.detach().cpu().double()
    return stored.shape == wanted.shape and torch.allclose(stored, wanted, rtol=rounding, atol=rounding)


def check_recorded(name: str, value: Tensor, expected: Sequence[float]) -> None:
    """Raise a UserError unless the stored weights `value` of all branches equal `expected` up to rounding."""
    if not agree(value, expected):
        raise UserError(
            f"the weights were trained with {name} {_outline(value.double().flatten().tolist())}, this network has "
            f"{_outline(expected)}; set `alpha_min`, `schedule`, `granularity`, `index` and `branches` to match"
        )


def _outline(values: Sequence[float]) -> str:
    """Return the first, the middle and the last of `values` and their number, for error messages."""
    shown = []
    if values:
        places = sorted({0, len(values) // 2, len(values) - 1})
        shown = [f"{values[i]:.4g}" for i in places]
    return f"[{' .. '.join(shown)}] ({len(values)} branches)"
