"""Names of weights without the parts that wrappers of modules add: torch.compile, DataParallel, FSDP, Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uvit_decay.runtime.errors import UserError

# Parts that torch.compile, FSDP and activation checkpointing put before the names of each module that they wrap.
MARKS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def without_marks(name: str) -> str:
    """Return the name of a weight without the `MARKS`, at any place in it."""
    return ".".join(part for part in name.split(".") if part not in MARKS)


def remove_prefix(state: Mapping[Any, Any], prefix: str, where: object) -> dict[str, Any]:
    """Return the entries without marks, and with a prefix removed from the names that have it.

    Args:
        state: entries by name.
        prefix: prefix of names without marks, such as "module."; may be empty.
        where: their file, for error messages.

    Raises:
        UserError: two entries have the same name without marks and prefix.
    """
    renamed: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for given, value in state.items():
        name = str(given)
        short = without_marks(name).removeprefix(prefix)
        if short in renamed:
            both = " and ".join(sorted([origin[short], name], key=len))
            raise UserError(f"{where} has both {both}: it is damaged, or two networks in one file")
        renamed[short] = value
        origin[short] = name
    return renamed


def find_shared_prefix(state: Mapping[str, Any]) -> str:
    """Return the parts that begin all names, such as "module."; empty if there are none."""
    names = [without_marks(name).split(".") for name in state]
    shared: list[str] = []
    for parts in zip(*(name[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}." for part in shared)
