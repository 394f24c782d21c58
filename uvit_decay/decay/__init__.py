"""Shortcuts that decay with depth (`schedule`), and their attachment to networks of other libraries (`attach`)."""

from typing import Any

# Imported at once: `attach` is a function and its module, and the later import of the module would hide the function.
from uvit_decay.decay.attach import Attached, attach
from uvit_decay.decay.blocks import Gated, Single
from uvit_decay.decay.mixing import Merge, mixing_matrix
from uvit_decay.decay.schedule import (
    Branches,
    Granularity,
    Index,
    alpha_min_for,
    decayed_add,
    effective_decay,
    schedule_type,
    shortcuts,
)
from uvit_decay.decay.table import DEPTH_ATTENTION, SHORTCUTS, DepthAttention, Kind, Shortcuts, Weights, weighted

__all__ = [
    "DEPTH_ATTENTION",
    "SHORTCUTS",
    "Attached",
    "Branches",
    "DepthAttention",
    "Gated",
    "Granularity",
    "Index",
    "Kind",
    "Merge",
    "Schedule",
    "Shortcuts",
    "Single",
    "Weights",
    "alpha_min_for",
    "attach",
    "decayed_add",
    "effective_decay",
    "mixing_matrix",
    "shortcuts",
    "weighted",
]


def __getattr__(name: str) -> Any:
    """Return the type `Schedule`, whose names are the tables' at this time."""
    if name == "Schedule":
        return schedule_type()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
