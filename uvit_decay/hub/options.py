"""Options of the README.md of an exported folder; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uvit_decay.runtime.errors import UserError


@dataclass(frozen=True)
class CardOptions:
    """README.md of a folder for diffusers.

    Args:
        license: licence of the weights, as the Hub writes it, such as mit or cc-by-nc-4.0; default: unknown.
        metrics: report of evaluate.py on these weights, a .json; may be given again for more; those of the run itself
            are found in its folder.
        grid: sample a grid of pictures.
    """

    license: str | None = None
    metrics: Sequence[Path] = ()
    grid: bool = True

    def __post_init__(self) -> None:
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.license):
            raise UserError(f"--license {self.license!r}: give its short name on the Hub, such as mit or cc-by-nc-4.0")
