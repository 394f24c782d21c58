"""Names of the sets of weights that a checkpoint holds; imports no torch."""

from __future__ import annotations

from typing import Literal

from uvit_decay.runtime.errors import UserError

AVERAGE, RAW = "ema", "raw"
Kind = Literal["ema", "raw"]


class WeightSet(str):
    """Name of a set of weights: raw, ema (the run's first average), or ema:DECAY, its average of this decay.

    Raises:
        UserError: another name, or a decay that is not in [0, 1).
    """

    def __new__(cls, name: str) -> WeightSet:
        kind, _, text = name.partition(":")
        if name in (AVERAGE, RAW):
            return super().__new__(cls, name)
        if kind == AVERAGE and (decay := decay_in(text)) is not None:
            return super().__new__(cls, f"{AVERAGE}:{decay}")
        raise UserError(f"weights must be ema or raw, or ema:DECAY of an average, as ema:0.999; got {name[:40]!r}")

    @classmethod
    def of_decay(cls, decay: float) -> WeightSet:
        """Return the name of the average of this decay."""
        return cls(f"{AVERAGE}:{decay}")


Weights = WeightSet | Kind


def slug(name: str) -> str:
    """Return the name of a set of weights as a part of file names, such as ema-0.999."""
    return name.replace(":", "-")


def decay_in(text: str) -> float | None:
    """Return the decay in [0, 1) that is written in `text`; None if there is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0.0 <= number < 1.0 else None
