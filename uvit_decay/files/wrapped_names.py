"""Names of weights without the parts that wrappers of modules add: torch.compile, DataParallel, FSDP, Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os.path import commonprefix
from typing import Any

from uvit_decay.terminal.errors import UserError

# Parts that torch.compile, FSDP and activation checkpointing put before the names of each module that they wrap.
MARKS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def shorten_names(names: Iterable[Any]) -> dict[Any, str]:
    """Return each name without `MARKS`, and without the parts that begin all of them, such as "module."."""
    parts = {}
    for name in names:
        parts[name] = [part for part in str(name).split(".") if part not in MARKS]
    shared = len(commonprefix([each[:-1] for each in parts.values()]))
    return {name: ".".join(each[shared:]) for name, each in parts.items()}


def strip_wrappers(state: Mapping[Any, Any], where: object) -> tuple[dict[str, Any], str]:
    """Return entries under their names without the parts of wrappers, and a remark if any part was removed.

    Args:
        state: entries by name.
        where: their file, for error messages.
    """
    stripped: dict[str, Any] = {}
    origin: dict[str, object] = {}
    for name, short in shorten_names(state).items():
        if short in stripped:
            raise UserError(f"{where} has both {origin[short]} and {name}: it is damaged, or two networks in one file")
        stripped[short] = state[name]
        origin[short] = name
    for short, name in origin.items():
        if short != name:
            return stripped, f"took parts of wrappers off the names of its weights: {name} is now {short}"
    return stripped, ""
