"""A denoiser on a noise path, which samplers integrate, and the interval of times at which it is defined.

Samplers run from t = 1, noise, to t = 0, data, so that a step from `now` to `after` adds (now - after) velocity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from uvit_decay.diffusion.loss import T_EPS, Prediction
from uvit_decay.diffusion.noise_path import Interpolant, NoisePath

ROUNDING = 1e-6  # tolerance in comparisons of float32 times

DenoiseFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Noise = Callable[[int], Tensor]  # step index -> standard normal noise in the shape of the states
Trajectory = Iterator[tuple[float, Tensor]]


def sampling_interval(path: NoisePath, prediction: Prediction, clip: bool) -> tuple[float, float]:
    """Return the first and the last time at which samplers evaluate the network, as in SiT.

    Only the velocity of an interpolant, without clipping, is defined at t = 0. Where alpha_1 = 0, eps and the score
    at t = 1 do not determine x.
    """
    whole = isinstance(path, Interpolant)
    low = 0.0 if whole and prediction == "velocity" and not clip else T_EPS
    return low, 1 - T_EPS if whole and prediction in ("eps", "score") else 1.0


@dataclass(frozen=True)
class Denoiser:
    """Denoiser on a noise path: (x_t, t) -> (x, eps) with x_t = alpha_t x + sigma_t eps, for `low` <= t <= `high`.

    With guidance restricted to an interval, the closed interval `guided`, `plain` replaces `fn` outside of it.
    """

    fn: DenoiseFn
    path: NoisePath
    low: float = T_EPS
    high: float = 1.0
    plain: DenoiseFn | None = None
    guided: tuple[float, float] = (0.0, 1.0)

    def denoise(self, x: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return (data, noise) of the states x at `time`, with one network evaluation."""
        # `time` is a float on the host, so that this comparison does not wait for the device.
        guided = self.guided[0] - ROUNDING <= time <= self.guided[1] + ROUNDING
        fn = self.fn if guided or self.plain is None else self.plain
        return fn(x, times_like(x, time))

    def velocity(self, x: Tensor, time: float) -> Tensor:
        """Return the velocity of the probability flow towards the data, with one network evaluation."""
        return self.path.velocity(*self.denoise(x, time), times_like(x, time))


def times_like(x: Tensor, time: float) -> Tensor:
    """Return `time` for each sample of x, (b,) in the dtype and on the device of x."""
    return torch.full((len(x),), time, device=x.device, dtype=x.dtype)


def linspace(high: float, low: float, count: int) -> list[float]:
    """Return `count` equally spaced times from `high` to `low`."""
    return torch.linspace(high, low, count, dtype=torch.float64, device="cpu").tolist()
