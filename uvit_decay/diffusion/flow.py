"""What samplers integrate: a denoiser on a path, and the times at which it has values.

Samplers go from t = 1, noise, to t = 0, data, so that a step from `now` to `after` adds (now - after) velocity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from uvit_decay.diffusion.loss import EDGE, Prediction
from uvit_decay.diffusion.path import Interpolant, Path

ROUNDING = 1e-6  # of times in float32

Denoiser = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Noise = Callable[[int], Tensor]  # standard normal, of the shape of the states, for each number of a step
Trajectory = Iterator[tuple[float, Tensor]]


def sampling_interval(path: Path, prediction: Prediction, clip: bool) -> tuple[float, float]:
    """The times between which a network is asked, as in SiT.

    The velocity of an interpolant says all at both ends; no other has a value at t = 0, nor has any where x was clipped
    there; and eps and the score say nothing of x at t = 1 where alpha_1 = 0.
    """
    whole = isinstance(path, Interpolant)
    low = 0.0 if whole and prediction == "velocity" and not clip else EDGE
    return low, 1 - EDGE if whole and prediction in ("eps", "score") else 1.0


@dataclass(frozen=True)
class Flow:
    """`denoise` is (x_t, t) -> (x, eps) with x_t = alpha_t x + sigma_t eps; it is asked at `low` <= t <= `high`.

    Where there is guidance, outside of the times `guided`, ends included, `plain` is asked in its place.
    """

    denoise: Denoiser
    path: Path
    low: float = EDGE
    high: float = 1.0
    plain: Denoiser | None = None
    guided: tuple[float, float] = (0.0, 1.0)

    def split(self, x: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """(data, noise) of the states x at `time`: one evaluation of the network."""
        guided = self.guided[0] - ROUNDING <= time <= self.guided[1] + ROUNDING  # known without asking the device
        denoise = self.denoise if guided or self.plain is None else self.plain
        return denoise(x, times_like(x, time))

    def velocity(self, x: Tensor, time: float) -> Tensor:
        """Velocity of the probability flow towards the data: one evaluation of the network."""
        return self.path.velocity(*self.split(x, time), times_like(x, time))


def times_like(x: Tensor, time: float) -> Tensor:
    """`time` for each sample of x."""
    return torch.full((len(x),), time, device=x.device, dtype=x.dtype)


def linspace(high: float, low: float, count: int) -> list[float]:
    """`count` times from high to low."""
    return torch.linspace(high, low, count, dtype=torch.float64, device="cpu").tolist()
