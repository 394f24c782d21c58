"""Shortcuts that decay with depth (`schedule`), and their attachment to networks of other libraries (`attach`)."""

from typing import Any

# Imported at once: `attach` is a function and its module, and the later import of the module would hide the function.
from uvit_decay.decay.attach import Attached, attach
from uvit_decay.decay.blocks import Gated, Single
from uvit_decay.decay.connection import Connection, Plan
from uvit_decay.decay.mixing import Merge, mixing_matrix
from uvit_decay.decay.schedule import (
    Branches,
    Granularity,
    Index,
    alpha_min_for,
    effective_decay,
    schedule_type,
    shortcuts,
)
from uvit_decay.decay.table import SHORTCUTS, Kind
from uvit_decay.decay.weights import Shortcuts, Weights, decayed_add, weighted

__all__ = [
    "SHORTCUTS",
    "Attached",
    "Branches",
    "Connection",
    "Gated",
    "Granularity",
    "Index",
    "Kind",
    "Merge",
    "Plan",
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
