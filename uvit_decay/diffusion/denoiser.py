"""Denoiser that samplers integrate, and wrappers of a network: compiled, counted.

Samplers run from t = 1, noise, to t = 0, data, so that a step from `now` to `after` adds (now - after) velocity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.prediction import T_EPS, Network

DenoiseFn = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Noise = Callable[[int], Tensor]  # step index -> standard normal noise in the shape of the states
Trajectory = Iterator[tuple[float, Tensor]]


@dataclass(frozen=True)
class Denoiser:
    """Denoiser on a noise path: (x_t, t) -> (x, eps) with x_t = alpha_t x + sigma_t eps, for `low` <= t <= `high`.

    Args:
        fn: the function (x_t, t) -> (x, eps), or (x, eps, v) with a learned variance, see `ode.dit_ddpm`.
        path: the noise path.
        low: first time, at the end of data.
        high: last time, at the end of noise.
    """

    fn: DenoiseFn
    path: NoisePath
    low: float = T_EPS
    high: float = 1.0

    def denoise(self, x: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return (data, noise) of the states x at `time`, with one network evaluation."""
        data, eps, *_ = self.evaluate(x, time)
        return data, eps

    def evaluate(self, x: Tensor, time: float) -> tuple[Tensor, ...]:
        """Return (data, noise) of the states x at `time`, or (data, noise, v) with a learned variance."""
        return self.fn(x, times_like(x, time))

    def velocity(self, x: Tensor, time: float) -> Tensor:
        """Return the velocity of the probability flow towards the data, with one network evaluation."""
        data, eps = self.denoise(x, time)
        return self.path.velocity(data, eps, times_like(x, time))


def times_like(x: Tensor, time: float) -> Tensor:
    """Return `time` for each sample of x, (b,) in the dtype and on the device of x."""
    return torch.full((len(x),), time, device=x.device, dtype=x.dtype)


def linspace(high: float, low: float, count: int) -> list[float]:
    """Return `count` equally spaced times from `high` to `low`."""
    return torch.linspace(high, low, count, dtype=torch.float64, device="cpu").tolist()


# ---- wrappers of a network that keep its interface net(x, t, y)


class CompiledNet:
    """Network compiled by torch.compile, with the same call: one graph for all batches of two or more images.

    A smaller last batch, or guidance in an interval, does not compile again. `backend` is passed to torch.compile.
    """

    def __init__(self, net: Network, backend: str | Callable[..., Any] = "inductor") -> None:
        self.net = torch.compile(net, backend=backend)

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch._dynamo.maybe_mark_dynamic(t, 0)
        if y is not None:
            torch._dynamo.maybe_mark_dynamic(y, 0)
        return self.net(x, t, y)


class NFECounter:
    """Network with the same call that counts evaluations per image in `nfe`; a guided step counts twice."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.nfe = 0

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        self.nfe += len(x)
        return self.net(x, t, y)
