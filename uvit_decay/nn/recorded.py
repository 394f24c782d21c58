"""Comparison of the weights of shortcuts and long skips in a state_dict with the network that loads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uvit_decay.terminal.errors import UserError


def check_recorded(
    what: str, value: Tensor | None, expected: Sequence[float] | Sequence[Sequence[float]], options: str
) -> None:
    """Raise a UserError unless stored weights have the shape of `expected` and, up to rounding, its numbers.

    Weights are recorded in float32, and perhaps converted with the whole network later; None means all 1.
    """
    wanted = torch.tensor(expected, dtype=torch.float64, device="cpu")
    found = "1"
    if value is not None:
        rounding = torch.finfo(torch.float32).eps
        if value.is_floating_point():
            rounding = max(rounding, torch.finfo(value.dtype).eps)
        stored = value.detach().cpu().double()
        if stored.shape == wanted.shape and torch.allclose(stored, wanted, rtol=rounding, atol=rounding):
            return
        found = _outline(stored)
    raise UserError(
        f"the weights were trained with {what} {found}, this network has {_outline(wanted)}; set {options} to match"
    )


def _outline(values: Tensor) -> str:
    """Return the first, the middle and the last of `values` and their number, for error messages."""
    numbers = values.flatten().tolist()
    places = sorted({0, len(numbers) // 2, len(numbers) - 1}) if numbers else []
    shown = [f"{numbers[i]:.4g}" for i in places]
    return f"[{' .. '.join(shown)}] ({len(numbers)} numbers)"
