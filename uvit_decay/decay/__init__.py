"""The idea: shortcuts that decay with depth (`schedule`), in our networks and in anybody's transformer (`foreign`)."""

from uvit_decay.decay.foreign import Attached, Gated, attach
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
    "alpha_min_for",
    "attach",
    "decayed_add",
    "effective_decay",
    "shortcuts",
]
