"""Options of log-likelihoods, as a group of a command line; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from uvit_decay.runtime.command_line import Bounds, check_bounds
from uvit_decay.sampling_options import MOST_IMAGES, Count, PrecisionOption, Seed


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
    steps: Annotated[int, Bounds(1, 100_000)] = 500
    labels: Literal["own", "null"] = "own"
    num: Annotated[int, Bounds(2, MOST_IMAGES)] = 1000
    seed: Seed = 0
    batch_size: Count = 64
    precision: PrecisionOption | None = None

    def __post_init__(self) -> None:
        check_bounds(type(self), vars(self))
