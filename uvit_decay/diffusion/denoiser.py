"""A denoiser on a noise path, which samplers integrate, and the interval of times at which it is defined.

Samplers run from t = 1, noise, to t = 0, data, so that a step from `now` to `after` adds (now - after) velocity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from uvit_decay.diffusion.loss import EDGE, Prediction
from uvit_decay.diffusion.noise_path import Interpolant, Path

ROUNDING = 1e-6  # tolerance in comparisons of float32 times

Denoiser = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Noise = Callable[[int], Tensor]  # step index -> standard normal noise in the shape of the states
Trajectory = Iterator[tuple[float, Tensor]]


def sampling_interval(path: Path, prediction: Prediction, clip: bool) -> tuple[float, float]:
    """Return the first and the last time at which samplers evaluate the network, as in SiT.

    Only the velocity of an interpolant, without clipping, is defined at t = 0. Where alpha_1 = 0, eps and the score
    at t = 1 do not determine x.
    """
    whole = isinstance(path, Interpolant)
    low = 0.0 if whole and prediction == "velocity" and not clip else EDGE
    return low, 1 - EDGE if whole and prediction in ("eps", "score") else 1.0


@dataclass(frozen=True)
class Flow:
    """Denoiser on a noise path: (x_t, t) -> (x, eps) with x_t = alpha_t x + sigma_t eps, for `low` <= t <= `high`.

    With guidance restricted to an interval, the closed interval `guided`, `plain` replaces `denoise` outside of it.
    """

    denoise: Denoiser
    path: Path
    low: float = EDGE
    high: float = 1.0
    plain: Denoiser | None = None
    guided: tuple[float, float] = (0.0, 1.0)

    def split(self, x: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return (data, noise) of the states x at `time`, with one network evaluation."""
        # `time` is a float on the host, so that this comparison does not wait for the device.
        guided = self.guided[0] - ROUNDING <= time <= self.guided[1] + ROUNDING
        denoise = self.denoise if guided or self.plain is None else self.plain
        return denoise(x, times_like(x, time))

    def velocity(self, x: Tensor, time: float) -> Tensor:
        """Return the velocity of the probability flow towards the data, with one network evaluation."""
        return self.path.velocity(*self.split(x, time), times_like(x, time))


def times_like(x: Tensor, time: float) -> Tensor:
    """Return `time` for each sample of x, (b,) in the dtype and on the device of x."""
    return torch.full((len(x),), time, device=x.device, dtype=x.dtype)


def linspace(high: float, low: float, count: int) -> list[float]:
    """Return `count` equally spaced times from `high` to `low`."""
    return torch.linspace(high, low, count, dtype=torch.float64, device="cpu").tolist()
