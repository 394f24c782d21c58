"""Comparison of the weights of shortcuts and long skips in a state_dict with the network that loads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uvit_decay.runtime.errors import UserError


def storage_rounding(value: Tensor) -> float:
    """Return the relative rounding error of stored weights.

    They are recorded in float32, and perhaps converted with the whole network later.
    """
    return max(torch.finfo(value.dtype).eps, torch.finfo(torch.float32).eps)


def check_recorded(name: str, value: Tensor, expected: Sequence[float]) -> None:
    """Raise a UserError unless the stored weights `value` of all branches equal `expected` up to rounding."""
    stored = value.tolist()
    if not _agree(stored, expected, storage_rounding(value)):
        raise UserError(
            f"the weights were trained with {name} {_outline(stored)}, this network has {_outline(expected)}; "
            "set alpha_min, schedule, granularity, index and branches to match"
        )


def _agree(stored: Sequence[float], expected: Sequence[float], rounding: float) -> bool:
    """Return whether two lists have the same length and, up to `rounding`, the same numbers."""
    if len(stored) != len(expected):
        return False
    pairs = zip(stored, expected, strict=True)
    return not any(abs(a - b) > rounding * max(1.0, abs(b)) for a, b in pairs)


def _outline(values: Sequence[float]) -> str:
    """Return the first, the middle and the last of `values` and their number, for error messages."""
    shown = []
    if values:
        places = sorted({0, len(values) // 2, len(values) - 1})
        shown = [f"{values[i]:.4g}" for i in places]
    return f"[{' .. '.join(shown)}] ({len(values)} branches)"
