"""Options of evaluations, as groups of a command line; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from uvit_decay.runtime.command_line import Bounds
from uvit_decay.runtime.errors import MOST_SEED, check_whole


@dataclass(frozen=True)
class LikelihoodOptions:
    """Options of log-likelihoods.

    Args:
        solver: heun takes equal steps; dopri5 chooses its steps, for one image at a time.
        steps: steps of heun, with two evaluations and two gradients of the network each.
        labels: own, the label of each image, for class-conditional networks; or null, the label "no class".
        num: images at most, a fixed random choice.
        seed: of the noise within grey levels and of the random signs.
        batch_size: images at a time; changes no number but its rounding.
        precision: of the network; default: tf32 on CUDA GPUs, float32 elsewhere.
    """

    solver: Literal["heun", "dopri5"] = "heun"
    steps: Annotated[int, Bounds(1, 1000)] = 100
    labels: Literal["own", "null"] = "own"
    num: Annotated[int, Bounds(2, 10_000_000)] = 1000
    seed: Annotated[int, Bounds(0, MOST_SEED)] = 0
    batch_size: Annotated[int, Bounds(1, 10_000_000)] = 64
    precision: Literal["float32", "tf32", "bf16"] | None = None

    def __post_init__(self) -> None:
        check_whole(1, 1000, steps=self.steps)
        check_whole(1, 10_000_000, batch_size=self.batch_size)
        check_whole(2, 10_000_000, num=self.num)
        check_whole(0, MOST_SEED, seed=self.seed)
