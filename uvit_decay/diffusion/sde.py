"""Samplers that integrate the SDE of SiT (Ma et al. 2024) towards the data; any w(t) >= 0 gives the same marginals:

    x <- x + h (v + w score) + sqrt(2 w h) z,  t <- t - h.

w = g^2 / 2 is the reverse SDE of Song et al. (2021), which U-ViT uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Noise, Trajectory, linspace, times_like
from uvit_decay.diffusion.noise_path import NoisePath, Times, expand
from uvit_decay.diffusion.prediction import T_EPS
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Within, check_types

Form = Literal["constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing"]
LastStep = Literal["mean", "tweedie", "euler", "none"]

FORMS: dict[str, Callable[[NoisePath, Times, float], Times]] = {
    # w(t) with the norm c; SiT writes them in its time, 1 - t
    "constant": lambda path, t, c: torch.full_like(t, c),
    "sbdm": lambda path, t, c: c * 0.5 * path.diffusion2(t),
    "sigma": lambda path, t, c: c * path.sigma(t),
    "linear": lambda path, t, c: c * t,
    "decreasing": lambda path, t, c: 0.25 * (1 - c * torch.cos(math.pi * t)).square(),
    "increasing-decreasing": lambda path, t, c: c * torch.sin(math.pi * t).square(),
}


def short_number(number: float) -> str:
    """Return a short string for names, such as 2 or 0.04; different numbers have different strings."""
    return repr(float(number)).removesuffix(".0")


@check_types
@dataclass(frozen=True)
class SDE:
    """SDE with the method that integrates it.

    Args:
        form: w(t), a name in `uvit_decay.diffusion.sde.FORMS`.
        norm: factor c of the form.
        last_step: last step, without noise, from `last_time` to t = 0: along the drift (mean), to the denoised image
            (tweedie), or along the velocity (euler). With none, all steps are alike and end at the smallest time of
            the network.
        last_time: length of the last step.
        heun: use Heun's method for the drift, after the noise of the step is added: two evaluations per step, except
            for the last one.
    """

    form: Form = "sigma"
    norm: Annotated[float, Within("(0, inf)")] = 1.0
    last_step: LastStep = "mean"
    last_time: Annotated[float, Within("(0, 1)")] = 0.04
    heun: bool = False

    @property
    def name(self) -> str:
        """A short name for keys and files, such as `sigma1-mean0.04`."""
        name = f"{self.form}{short_number(self.norm)}-{self.last_step}{short_number(self.last_time)}"
        return f"{name}-heun" if self.heun else name

    def run(self, denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
        """Yield the trajectory (t, x_t) of `steps` steps."""
        separate = self.last_step != "none"
        if separate and self.last_time >= denoiser.high:
            raise UserError(f"last_time {self.last_time} is not below {denoiser.high}, the first time of this network")
        # N noisy steps need N + 1 times; a last step without noise replaces one of them. The times end above t = 0,
        # because the score, which Heun's method would need there, does not exist.
        if separate:
            times = linspace(denoiser.high, self.last_time, steps)
        else:
            times = linspace(denoiser.high, max(denoiser.low, T_EPS), steps + 1)
        step = self._heun if self.heun else self._euler
        for i, (now, after) in enumerate(pairwise(times)):
            x = step(denoiser, x, now, after, noise(i))
            is_end = not separate and after == times[-1]
            yield 0.0 if is_end else after, x
        if separate:
            yield 0.0, self._last(denoiser, x, times[-1])

    def _w(self, denoiser: Denoiser, x: Tensor, time: float) -> Tensor:
        """Return w(time) in a shape that broadcasts over x."""
        w = FORMS[self.form](denoiser.path, times_like(x, time), self.norm)
        return expand(w, x)

    def _drift(self, denoiser: Denoiser, x: Tensor, time: float) -> Tensor:
        """Return v + w score, with one network evaluation."""
        t = times_like(x, time)
        data, eps = denoiser.denoise(x, time)
        velocity = denoiser.path.velocity(data, eps, t)
        score = denoiser.path.score(eps, t)
        return velocity + self._w(denoiser, x, time) * score

    def _scale_noise(self, denoiser: Denoiser, x: Tensor, now: float, after: float, z: Tensor) -> Tensor:
        """Return the noise sqrt(2 w h) z that the step adds, z standard normal."""
        return (2 * (now - after) * self._w(denoiser, x, now)).sqrt() * z

    def _euler(self, denoiser: Denoiser, x: Tensor, now: float, after: float, z: Tensor) -> Tensor:
        """Return x at `after` by an Euler-Maruyama step."""
        moved = x + (now - after) * self._drift(denoiser, x, now)
        return moved + self._scale_noise(denoiser, x, now, after, z)

    def _heun(self, denoiser: Denoiser, x: Tensor, now: float, after: float, z: Tensor) -> Tensor:
        """Return x at `after` by Heun's step along the drift, after the noise of the step is added."""
        x = x + self._scale_noise(denoiser, x, now, after, z)
        drift = self._drift(denoiser, x, now)
        ahead = self._drift(denoiser, x + (now - after) * drift, after)
        return x + 0.5 * (now - after) * (drift + ahead)

    def _last(self, denoiser: Denoiser, x: Tensor, now: float) -> Tensor:
        """Return x at t = 0 by the last step, which adds no noise."""
        if self.last_step == "tweedie":
            data, _ = denoiser.denoise(x, now)
            return data
        if self.last_step == "mean":
            return x + now * self._drift(denoiser, x, now)
        return x + now * denoiser.velocity(x, now)
