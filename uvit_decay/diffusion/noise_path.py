"""Noise paths between data and noise, and the equations between x, eps, velocity and score.

Notation: x data, eps standard normal noise, t in [0, 1] with t = 0 data and t = 1 noise,

    x_t = alpha_t x + sigma_t eps.

The velocity belongs to the flow from noise to data, from t = 1 to t = 0:

    v = -dx_t / dt = -(alpha_t' x + sigma_t' eps).

SiT's networks predict the same v. SiT's convention differs only in the direction of time, t_SiT = 1 - t.

Every t below is a float tensor (b,). Coefficients have the shape of t; `expand` makes them broadcast over a batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from uvit_decay.runtime.constants import LEVEL_ROUNDING, LEVELS
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types

Times = Float[Tensor, " b"]
Batch = Float[Tensor, "b c h w"]


def expand(coefficient: Tensor, x: Tensor) -> Tensor:
    """Append dimensions of size one, so that a coefficient (b,) broadcasts over the batch x (b, ...)."""
    return coefficient.reshape(-1, *(1,) * (x.ndim - 1))


class NoisePath(ABC):
    """Gaussian noise path, given by alpha_t and sigma_t (abstract)."""

    @abstractmethod
    def alpha(self, t: Times) -> Times:
        """Return alpha_t, which falls from 1 to about 0."""

    @abstractmethod
    def sigma(self, t: Times) -> Times:
        """Return sigma_t, which rises from 0 to about 1."""

    @abstractmethod
    def d_alpha_t(self, t: Times) -> Times:
        """Return alpha_t' = d alpha_t / dt."""

    @abstractmethod
    def d_sigma_t(self, t: Times) -> Times:
        """Return sigma_t' = d sigma_t / dt; infinite at t = 0 for `VariancePreserving` paths."""

    def drift(self, t: Times) -> Times:
        """Return f(t) = d log alpha_t / dt of the forward SDE dx = f(t) x dt + g(t) dW; infinite where alpha_t = 0."""
        return self.d_alpha_t(t) / self.alpha(t)

    def diffusion2(self, t: Times) -> Times:
        """Return g(t)^2 = d sigma_t^2 / dt - 2 f(t) sigma_t^2 = 2 sigma_t (sigma_t' - f(t) sigma_t)."""
        return 2 * self.sigma(t) * (self.d_sigma_t(t) - self.drift(t) * self.sigma(t))

    def times(self, uniform: Times) -> Times:
        """Map numbers uniform on [0, 1) to training times; a path with a discrete grid rounds them up to it."""
        return uniform

    def add_noise(self, x: Batch, eps: Batch, t: Times) -> Batch:
        """Return x_t = alpha_t x + sigma_t eps."""
        return expand(self.alpha(t), x) * x + expand(self.sigma(t), x) * eps

    def x_from_eps(self, x_t: Batch, eps: Batch, t: Times) -> Batch:
        """Return x = (x_t - sigma_t eps) / alpha_t."""
        return (x_t - expand(self.sigma(t), x_t) * eps) / expand(self.alpha(t), x_t)

    def eps_from_x(self, x_t: Batch, x: Batch, t: Times) -> Batch:
        """Return eps = (x_t - alpha_t x) / sigma_t; t > 0."""
        return (x_t - expand(self.alpha(t), x_t) * x) / expand(self.sigma(t), x_t)

    def score(self, eps: Batch, t: Times) -> Batch:
        """Return grad log p_t(x_t) = -eps / sigma_t; t > 0."""
        return -eps / expand(self.sigma(t), eps)

    def eps_from_score(self, score: Batch, t: Times) -> Batch:
        """Return eps = -sigma_t score."""
        return -expand(self.sigma(t), score) * score

    def velocity(self, x: Batch, eps: Batch, t: Times) -> Batch:
        """Return v = -(alpha_t' x + sigma_t' eps)."""
        return -(expand(self.d_alpha_t(t), x) * x + expand(self.d_sigma_t(t), x) * eps)

    def x_eps_from_velocity(self, x_t: Batch, velocity: Batch, t: Times) -> tuple[Batch, Batch]:
        """Return (x, eps) of x_t and v, with D = alpha_t sigma_t' - sigma_t alpha_t':

        x = (sigma_t' x_t + sigma_t v) / D and eps = -(alpha_t' x_t + alpha_t v) / D.
        """
        alpha_t = expand(self.alpha(t), x_t)
        sigma_t = expand(self.sigma(t), x_t)
        d_alpha_t = expand(self.d_alpha_t(t), x_t)
        d_sigma_t = expand(self.d_sigma_t(t), x_t)
        determinant = alpha_t * d_sigma_t - sigma_t * d_alpha_t
        x = (d_sigma_t * x_t + sigma_t * velocity) / determinant
        eps = -(d_alpha_t * x_t + alpha_t * velocity) / determinant
        return x, eps


class Interpolant(NoisePath):
    """Path with alpha_1 = 0 and bounded derivatives, whose velocity is finite on all of [0, 1] (abstract).

    The drift is infinite at t = 1, where eps and the score do not determine x.
    """


@dataclass(frozen=True)
class Linear(Interpolant):
    """SiT's linear interpolant (Ma et al. 2024), rectified flow: alpha_t = 1 - t, sigma_t = t, and v = x - eps."""

    def alpha(self, t: Times) -> Times:
        return 1 - t

    def sigma(self, t: Times) -> Times:
        return t

    def d_alpha_t(self, t: Times) -> Times:
        return -torch.ones_like(t)

    def d_sigma_t(self, t: Times) -> Times:
        return torch.ones_like(t)


@dataclass(frozen=True)
class GVP(Interpolant):
    """SiT's generalised variance-preserving interpolant: alpha_t = cos(pi t / 2), sigma_t = sin(pi t / 2)."""

    def alpha(self, t: Times) -> Times:
        return torch.cos(0.5 * math.pi * t)

    def sigma(self, t: Times) -> Times:
        return torch.sin(0.5 * math.pi * t)

    def d_alpha_t(self, t: Times) -> Times:
        return -0.5 * math.pi * self.sigma(t)

    def d_sigma_t(self, t: Times) -> Times:
        return 0.5 * math.pi * self.alpha(t)


class VariancePreserving(NoisePath):
    """Path with sigma_t^2 = 1 - alpha_t^2, given by log alpha_t and the drift f = (log alpha_t)' (abstract)."""

    @abstractmethod
    def log_alpha(self, t: Times) -> Times:
        """Return log alpha_t."""

    @abstractmethod
    def drift(self, t: Times) -> Times: ...

    def alpha(self, t: Times) -> Times:
        return torch.exp(self.log_alpha(t))

    def sigma(self, t: Times) -> Times:
        return torch.sqrt(-torch.expm1(2 * self.log_alpha(t)))

    def diffusion2(self, t: Times) -> Times:
        """Return g^2 = d sigma_t^2 / dt - 2 f sigma_t^2 = -2 f alpha_t^2 - 2 f sigma_t^2 = -2 f."""
        return -2 * self.drift(t)

    def d_alpha_t(self, t: Times) -> Times:
        return self.drift(t) * self.alpha(t)

    def d_sigma_t(self, t: Times) -> Times:
        return -self.drift(t) * self.alpha(t).square() / self.sigma(t)


@check_types
@dataclass(frozen=True)
class VP(VariancePreserving):
    """Variance-preserving SDE of Song et al. (2021), beta(t) = beta_min + (beta_max - beta_min) t; U-ViT's path.

    alpha_t^2 = exp(-(beta_min t + (beta_max - beta_min) t^2 / 2)), with 0 < beta_min <= beta_max.
    """

    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_min <= self.beta_max < math.inf:
            raise UserError(f"VP needs 0 < beta_min <= beta_max, got {self.beta_min} and {self.beta_max}")

    def log_alpha(self, t: Times) -> Times:
        """Return minus half the integral of beta from 0 to t."""
        return -0.5 * (self.beta_min * t + 0.5 * (self.beta_max - self.beta_min) * t.square())

    def drift(self, t: Times) -> Times:
        """Return -beta(t) / 2."""
        return -0.5 * (self.beta_min + (self.beta_max - self.beta_min) * t)


@dataclass(frozen=True)
class Discrete(VariancePreserving):
    """Path of LEVELS noise levels, with log alpha_t linear between them; 0 < beta_start <= beta_end < 1 (abstract).

    alpha_{t_n}^2 = prod_{i <= n} (1 - beta_i) and alpha_0 = 1; f and g are constant on each (t_{n-1}, t_n]. Training
    uses the t_n only.
    """

    beta_start: float
    beta_end: float

    def __post_init__(self) -> None:
        if not 0 < self.beta_start <= self.beta_end < 1:
            name = type(self).__name__
            raise UserError(f"{name} needs 0 < beta_start <= beta_end < 1, got {self.beta_start} and {self.beta_end}")

    @abstractmethod
    def betas(self) -> Float[Tensor, " levels"]:
        """Return beta_1 .. beta_LEVELS, float64 on the CPU."""

    def times(self, uniform: Times) -> Times:
        return self._level(uniform, rounding=0.0).to(uniform.dtype) / LEVELS

    def drift(self, t: Times) -> Times:
        _, steps = _tables(self, t.device, t.dtype)
        return LEVELS * steps[self._level(t) - 1]

    def log_alpha(self, t: Times) -> Times:
        """Return log alpha_t, interpolated between the levels around t."""
        before = self._level(t) - 1
        starts, steps = _tables(self, t.device, t.dtype)
        return starts[before] + steps[before] * (LEVELS * t - before)

    def _level(self, t: Times, rounding: float = LEVEL_ROUNDING) -> Int[Tensor, " b"]:
        """Return the n of the interval (t_{n-1}, t_n] that contains t; 1 at t = 0."""
        return (LEVELS * t - rounding).ceil().long().clamp(1, LEVELS)


@check_types
@dataclass(frozen=True)
class SDDiscrete(Discrete):
    """Schedule of Stable Diffusion, the path of U-ViT-H: sqrt(beta_n) in equal steps between the roots of both betas.

    A network that was trained with n as its time has time_scale = 1000.
    """

    beta_start: float = 0.00085
    beta_end: float = 0.012

    def betas(self) -> Float[Tensor, " levels"]:
        first = self.beta_start**0.5
        last = self.beta_end**0.5
        roots = torch.linspace(first, last, LEVELS, dtype=torch.float64, device="cpu")
        return roots.square()


@check_types
@dataclass(frozen=True)
class DDPMLinear(Discrete):
    """Schedule of DDPM (Ho et al. 2020), the path of DiT: beta_n in equal steps from beta_start to beta_end.

    DiT counts its levels from 0: its time is n - 1, which a SiT with time = dit embeds.
    """

    beta_start: float = 1e-4
    beta_end: float = 0.02

    def betas(self) -> Float[Tensor, " levels"]:
        return torch.linspace(self.beta_start, self.beta_end, LEVELS, dtype=torch.float64, device="cpu")


@cache
def _tables(path: Discrete, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log alpha at t_0 .. t_{LEVELS - 1} and the differences to the next level; computed in float64."""
    steps = 0.5 * torch.log1p(-path.betas())
    starts = steps.cumsum(0) - steps
    return starts.to(device, dtype), steps.to(device, dtype)
