"""Samplers that integrate the SDE of SiT (Ma et al. 2024) towards the data, any w(t) >= 0 giving the same marginals:

    x <- x + h (v + w score) + sqrt(2 w h) z,  t <- t - h.

w = g^2 / 2 is the reverse SDE of Song et al. (2021), U-ViT's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from uvit_decay.diffusion.flow import Flow, Noise, Trajectory, linspace, times_like
from uvit_decay.diffusion.loss import EDGE
from uvit_decay.diffusion.path import Interpolant, Path, Times, expand
from uvit_decay.errors import UserError

Form = Literal["constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing"]
LastStep = Literal["mean", "tweedie", "euler", "none"]

FORMS: dict[str, Callable[[Path, Times, float], Times]] = {
    # w(t) with the norm c; SiT writes them in its own time, 1 - t
    "constant": lambda path, t, c: torch.full_like(t, c),
    "sbdm": lambda path, t, c: c * 0.5 * path.diffusion2(t),
    "sigma": lambda path, t, c: c * path.sigma(t),
    "linear": lambda path, t, c: c * t,
    "decreasing": lambda path, t, c: 0.25 * (1 - c * torch.cos(math.pi * t)).square(),
    "increasing-decreasing": lambda path, t, c: c * torch.sin(math.pi * t).square(),
}


def short(number: float) -> str:
    """A number for names, such as 2 or 0.04, that no other number has."""
    return repr(float(number)).removesuffix(".0")


@dataclass(frozen=True)
class SDE:
    """How the SDE is integrated.

    Args:
        form: w(t), a name in `uvit_decay.diffusion.sde.FORMS`.
        norm: c of that form.
        last_step: without noise, from `last_time` to t = 0: along the drift (mean), to the denoised image (tweedie), or
            along the velocity (euler); none takes all steps alike, down to the last time that the network knows.
        last_time: length of the last step.
        heun: Heun's method for the drift, after the noise of the step is added: two evaluations a step but the last.

    Raises:
        UserError: a number out of range.
    """

    form: Form = "sigma"
    norm: float = 1.0
    last_step: LastStep = "mean"
    last_time: float = 0.04
    heun: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.norm < math.inf:
            raise UserError(f"the norm of the diffusion must be a number above 0, got {self.norm}")
        if not 0 < self.last_time < 1:
            raise UserError(f"last_time must lie between 0 and 1, got {self.last_time}")

    def check(self, path: Path) -> None:
        """Raise a UserError where w is infinite at t = 1."""
        if self.form == "sbdm" and isinstance(path, Interpolant):
            name = type(path).__name__
            raise UserError(
                f"the diffusion g^2 / 2 (sbdm) is infinite at t = 1 on the path {name}: use sampler sit-sde"
            )

    def evaluations(self, steps: int) -> int:
        """Network evaluations for each image."""
        noisy = steps if self.last_step == "none" else steps - 1
        return (2 if self.heun else 1) * noisy + steps - noisy

    def describe(self) -> str:
        """Short name for keys and files, such as `sigma1-mean0.04`."""
        parts = (f"{self.form}{short(self.norm)}", f"{self.last_step}{short(self.last_time)}")
        return "-".join((*parts, *(["heun"] if self.heun else [])))

    def run(self, flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
        """The trajectory in `steps` steps."""
        self.check(flow.path)
        alike = self.last_step == "none"
        if not alike and self.last_time >= flow.high:
            raise UserError(f"last_time {self.last_time} is not below {flow.high}, where this network is first asked")
        # the score has no value at t = 0, where Heun's method would ask for it
        times = linspace(flow.high, max(flow.low, EDGE) if alike else self.last_time, steps + alike)
        step = self._heun if self.heun else self._euler
        for i, (now, after) in enumerate(pairwise(times)):
            x = step(flow, x, now, after, noise(i))
            yield 0.0 if alike and after == times[-1] else after, x
        if not alike:
            yield 0.0, self._last(flow, x, times[-1])

    def _w(self, flow: Flow, x: Tensor, time: float) -> Tensor:
        return expand(FORMS[self.form](flow.path, times_like(x, time), self.norm), x)

    def _drift(self, flow: Flow, x: Tensor, time: float) -> Tensor:
        """v + w score, from one evaluation."""
        t = times_like(x, time)
        data, eps = flow.split(x, time)
        return flow.path.velocity(data, eps, t) + self._w(flow, x, time) * flow.path.score(eps, t)

    def _scaled(self, flow: Flow, x: Tensor, now: float, after: float, z: Tensor) -> Tensor:
        """The noise that the step adds, from a standard normal z."""
        return (2 * (now - after) * self._w(flow, x, now)).sqrt() * z

    def _euler(self, flow: Flow, x: Tensor, now: float, after: float, z: Tensor) -> Tensor:
        """A step of Euler and Maruyama."""
        moved = x + (now - after) * self._drift(flow, x, now)
        return moved + self._scaled(flow, x, now, after, z)

    def _heun(self, flow: Flow, x: Tensor, now: float, after: float, z: Tensor) -> Tensor:
        """The noise of the step, then Heun's step along the drift."""
        x = x + self._scaled(flow, x, now, after, z)
        drift = self._drift(flow, x, now)
        ahead = self._drift(flow, x + (now - after) * drift, after)
        return x + 0.5 * (now - after) * (drift + ahead)

    def _last(self, flow: Flow, x: Tensor, now: float) -> Tensor:
        if self.last_step == "tweedie":
            return flow.split(x, now)[0]
        return x + now * (self._drift(flow, x, now) if self.last_step == "mean" else flow.velocity(x, now))
