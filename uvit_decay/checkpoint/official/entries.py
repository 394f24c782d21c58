"""Training files: the entry that holds the state_dict of the network, its arguments and its step.

A wrapper of the network, such as DataParallel or torch.compile, puts parts of its own before the names of the weights.
They are removed where they begin all names.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from uvit_decay.checkpoint.options import Weights
from uvit_decay.files.wrapped_names import strip_wrappers
from uvit_decay.terminal.errors import UserError

ENTRIES: dict[Weights, tuple[str, ...]] = {
    "ema": ("ema", "model_ema", "state_dict_ema"),  # of SiT and REPA; of DeiT; of timm
    "raw": ("model", "state_dict"),  # of SiT, REPA, MAE and DeiT; of timm and Lightning
}
STEPS = ("steps", "global_step")  # of REPA; of Lightning


class Opened(NamedTuple):
    """The state_dict of one network in a file of another program.

    Args:
        state: its entries without the parts of wrappers; other contents of a file are unchanged.
        weights: the set of weights; None for a file that does not tell it.
        entry: the entry of the file that holds it; None for a bare state_dict.
        arguments: the recorded arguments of the training run.
        step: the recorded optimizer step, otherwise 0.
        notes: lines for the user.
    """

    state: Any
    weights: Weights | None = None
    entry: str | None = None
    arguments: Mapping[str, Any] = {}
    step: Any = 0
    notes: tuple[str, ...] = ()


def open_entry(contents: Any, weights: Weights | None, entry: str | None, where: Path) -> Opened:
    """Return the state_dict of the network in a state_dict or in a training file.

    Args:
        contents: contents of the file.
        weights: the wanted set of weights; None takes EMA weights if there is an entry of them.
        entry: the entry of the state_dict, such as "state_dict.model"; None finds it by its usual name, see `ENTRIES`.
        where: the file, for error messages.
    """
    if not isinstance(contents, Mapping):
        return Opened(contents)
    state = contents
    if entry is not None:
        state = _find_part(contents, entry, where)
        named = "ema" if "ema" in re.split(r"[._]", entry) else "raw"
        weights = weights or named
    elif found := _find_usual(contents):
        weights = weights or next(iter(found))
        if weights not in found:
            (other,) = found
            only = f"its entry {found[other]} holds {other} weights: give `weights` {other}"
            raise UserError(f"{where} has no {weights} weights, {only}")
        entry = found[weights]
        state = contents[entry]
    state, note = strip_wrappers(state, where)
    arguments = contents.get("args")
    if isinstance(arguments, Namespace):
        arguments = vars(arguments)
    if not isinstance(arguments, Mapping):
        arguments = {}
    notes = (note,) if note else ()
    step = int(where.stem) if entry and where.stem.isdecimal() else 0  # SiT names its files by the step
    for name in STEPS:
        if name in contents:
            step = contents[name]
    return Opened(state, weights, entry, arguments, step, notes)


def _find_usual(contents: Mapping[Any, Any]) -> dict[Weights, str]:
    """Return the usual entries that a training file has, by the set of weights; EMA weights first."""
    found: dict[Weights, str] = {}
    for weights, names in ENTRIES.items():
        for name in names:
            if isinstance(contents.get(name), Mapping):
                found[weights] = name
                break
    return found


def _find_part(contents: Mapping[Any, Any], entry: str, where: Path) -> Mapping[Any, Any]:
    """Return the state_dict at `entry`: keys of nested dicts and parts that begin the names of weights, with dots."""
    found = contents
    for part in entry.split("."):
        inner = found.get(part)
        if not isinstance(inner, Mapping):
            start = f"{part}."
            inner = {name.removeprefix(start): value for name, value in found.items() if str(name).startswith(start)}
        if not inner:
            parts = sorted({str(name).partition(".")[0] for name in found})
            raise UserError(f"{where} has no entry {entry}: there is no {part} among {', '.join(parts[:8])}")
        found = inner
    return found
