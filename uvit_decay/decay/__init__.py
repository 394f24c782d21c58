"""Shortcuts that decay with depth (`schedule`), and their attachment to networks of other libraries (`attach`)."""

from uvit_decay.decay.attach import Attached, attach
from uvit_decay.decay.blocks import Gated, Single
from uvit_decay.decay.schedule import (
    Branches,
    Granularity,
    Index,
    Schedule,
    Shortcuts,
    alpha_min_for,
    decayed_add,
    effective_decay,
    shortcuts,
)

__all__ = [
    "Attached",
    "Branches",
    "Gated",
    "Granularity",
    "Index",
    "Schedule",
    "Shortcuts",
    "Single",
    "alpha_min_for",
    "attach",
    "decayed_add",
    "effective_decay",
    "shortcuts",
]
