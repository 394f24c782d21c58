"""The averages of the weights in a training checkpoint, as the callback EMA stores them.

Its state is {shadow, updates} of the first average, with further ones {shadow, updates, decay, extra: {decay: {shadow,
updates}}}, the decays in `extra` as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.plain import typed
from uvit_decay.weights import WeightSet, decay_in


def averages(state: object, where: object) -> dict[WeightSet, dict[str, Tensor]]:
    """Return the averages in a state of the callback, by name: the first as ema, and by its decay if that is stored.

    Args:
        state: state of the callback; empty if there was none.
        where: file that it is from, for errors.
    """
    state = typed(dict[str, object], state, f"EMA of {where}")
    first = typed(dict[str, Tensor], state.get("shadow", {}), f"EMA weights of {where}")
    if not first:
        return {}
    named = {WeightSet("ema"): first}
    if "decay" in state:
        named[WeightSet.of_decay(typed(float, state["decay"], f"EMA decay of {where}"))] = first
    for name, average in extras(state, where).items():
        shadow = typed(dict[str, object], average, f"EMA {name} of {where}").get("shadow")
        named[WeightSet.of_decay(float(name))] = typed(dict[str, Tensor], shadow, f"EMA {name} of {where}")
    return named


def extras(state: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return the states of further averages by their decay, as text; raise a UserError for one that is no decay."""
    found = typed(dict[str, object], state.get("extra", {}), f"EMA extra of {where}")
    for name in found:
        if name != str(decay_in(name)):
            raise UserError(f"{where} is damaged: it names an EMA decay {name[:40]!r}")
    return found
