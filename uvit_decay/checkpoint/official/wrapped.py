"""State_dicts of networks that others wrapped: Lightning modules, DataParallel, torch.compile, FSDP, EMA copies.

A wrapper puts its own parts before the names of the network: `module.`, `_orig_mod.`, or the attribute of a Lightning
module, in any order. The network is found by the names of its own weights, so the parts may have any name. A checkpoint
of Lightning has its state_dict in an entry, with the step beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from uvit_decay.checkpoint.detect import network_prefixes
from uvit_decay.checkpoint.options import Weights
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.validation import as_type
from uvit_decay.runtime.wrapped_names import MARKS, remove_prefix

ENTRIES: dict[Weights, str] = {"ema": "state_dict_ema", "raw": "state_dict"}  # Lightning has the second one only
STEP = "global_step"  # Lightning's entry
AVERAGE = re.compile(r"(^|[._])(ema|averaged?)([._]|$)")  # in prefixes of averaged weights


class Unwrapped(NamedTuple):
    """The state_dict of one network.

    Args:
        state: its entries; unchanged contents if there is no network.
        weights: the set of weights if the file tells it.
        step: the optimizer step if the file records it, otherwise 0.
        notes: lines for the user.
    """

    state: Any
    weights: Weights | None = None
    step: int = 0
    notes: tuple[str, ...] = ()


def unwrap(contents: Any, weights: Weights | None, where: Path) -> Unwrapped:
    """Return the state_dict of the network in a state_dict or in a checkpoint of Lightning.

    Args:
        contents: contents of the file, or the entry of another training file.
        weights: the wanted set of weights; None takes EMA weights if there are any.
        where: the file, for error messages.

    Raises:
        UserError: there is no such set of weights, or there are several networks.
    """
    if not isinstance(contents, Mapping):
        return Unwrapped(contents)
    entry = _entry(contents, weights)
    state = contents[entry] if entry else contents
    prefixes = network_prefixes(state)
    if not prefixes:
        return Unwrapped(contents)
    prefix = _choose(prefixes, weights, where)
    stored: Weights | None = "ema" if entry == ENTRIES["ema"] or AVERAGE.search(prefix) else None
    if entry and stored is None:
        stored = "raw"
    if weights not in (None, stored) and stored is not None:
        raise UserError(f"{where} has no {weights} weights, only {stored}: give --weights {stored}")
    step = as_type(int, contents.get(STEP, 0), f"{where}: {STEP}") if entry else 0
    named, notes = _take(state, prefix, where)
    return Unwrapped(named, stored, step, notes)


def _entry(contents: Mapping[Any, Any], weights: Weights | None) -> str | None:
    """Return the entry of a training file that holds the state_dict; None if the file is a state_dict itself."""
    wanted = [ENTRIES["raw"]] if weights == "raw" else list(ENTRIES.values())
    for name in wanted:
        part = contents.get(name)
        if isinstance(part, Mapping) and network_prefixes(part):
            return name
    return None


def _choose(prefixes: list[str], weights: Weights | None, where: Path) -> str:
    """Return the prefix of the wanted network; raise a UserError if several fit."""
    averaged = [prefix for prefix in prefixes if AVERAGE.search(prefix)]
    others = [prefix for prefix in prefixes if prefix not in averaged]
    wanted = averaged or others
    if weights == "raw":
        wanted = others or averaged
    if len(wanted) > 1:
        raise UserError(
            f"{where} holds {len(wanted)} networks, {', '.join(wanted)}: save the state_dict of one of them as a file"
        )
    return wanted[0]


def _take(state: Mapping[Any, Any], prefix: str, where: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the entries of a network without the parts of its wrappers, and remarks on what was removed."""
    renamed = remove_prefix(state, "", where)
    notes = []
    marks = sorted(MARKS & {part for name in state for part in str(name).split(".")})
    removed = [f"{mark}." for mark in marks] + [prefix] * bool(prefix)
    if removed:
        notes.append(f"took {' and '.join(removed)} off the names of its weights, which wrappers put there")
    outside = [name for name in renamed if not name.startswith(prefix)]
    if outside:
        notes.append(f"left out {len(outside)} entries outside {prefix}, such as {outside[0]}")
    network = {name.removeprefix(prefix): value for name, value in renamed.items() if name.startswith(prefix)}
    return network, tuple(notes)
