"""Settings of the probes, which are a group of command-line options, too; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from uvit_decay.runtime.command_line import Bounds, check_bounds
from uvit_decay.runtime.errors import MOST_SEED, UserError

if TYPE_CHECKING:
    from uvit_decay.data import ImageData

TIMES = (0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
Most = Annotated[int, Bounds(1, 2**31)]


@dataclass(frozen=True)
class Probing:
    """How features are probed.

    Args:
        times: comma-separated noise levels in (0, 1).
        layers: comma-separated numbers or names; default: all.
        pool: mean of patch tokens, or of all tokens.
        max_train: training images at most, a fixed random choice.
        max_test: test images at most, likewise.
        neighbours: k of the nearest neighbours.
        uniform: one vote for each neighbour, instead of DINO's weights.
        seed: of the noise.
        batch_size: images at a time on each device.

    Raises:
        UserError: a time outside (0, 1), or a number out of range.
    """

    times: tuple[float, ...] = TIMES
    layers: tuple[str, ...] | None = None
    pool: Literal["mean", "all"] = "mean"
    max_train: Most = 50_000
    max_test: Most = 10_000
    neighbours: Most = 20
    uniform: Annotated[bool, "--knn-uniform"] = False
    seed: Annotated[int, Bounds(0, MOST_SEED)] = 0
    batch_size: Most = 256

    def __post_init__(self) -> None:
        if not self.times or not all(0.0 < t < 1.0 for t in self.times):
            raise UserError(f"probe times must lie in (0, 1), got {list(self.times)}")
        check_bounds(type(self), vars(self))

    def chosen(self, data: ImageData) -> tuple[list[int], list[int]]:
        """Return the indices of the training and the test images."""
        from uvit_decay.data.batches import subset

        return subset(data.train, self.max_train, "probe train"), subset(data.test, self.max_test, "probe test")
