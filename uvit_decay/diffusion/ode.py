"""Samplers that integrate the probability-flow ODE dx/dt = -v(x, t) from noise to data, or its exponential form (DDIM).

Its slope comes from the velocity, which is finite at t = 1 where the drift of a linear or GVP path is not. DDPM is here
because it is DDIM with noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from uvit_decay.diffusion.flow import Flow, Noise, Trajectory, linspace, times_like

FIRST_TIME = 1e-3  # the last time before 0 at which U-ViT's SDE and ODE samplers call the network
ATOL, RTOL = 1e-6, 1e-3  # of dopri5, as in SiT

State = TypeVar("State", Tensor, tuple[Tensor, ...])


def ddim(flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """DDIM of Song et al. (2021), eta = 0: x_s = alpha_s x + sigma_s eps, in equal steps from t = 1.

    Not diffusers' DDIMScheduler: it moves x by GRID // steps whatever the timesteps, so most step counts miss t = 0.
    """
    for now, after in pairwise(linspace(flow.high, 0.0, steps + 1)):
        denoised, eps = flow.split(x, now)
        x = flow.path.noised(denoised, eps, times_like(x, after))
        yield after, x


def ddpm(flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Ancestral sampling of Ho et al. (2020): x_s from its posterior given x and x_t; the steps of `ddim`.

    The posterior is DDIM's step with a part of eps drawn anew, all but r = (alpha_t / sigma_t) / (alpha_s / sigma_s).
    Not diffusers' DDPMScheduler: it looks for its place among the timesteps on the device, and so waits for it.
    """
    times = linspace(flow.high, 0.0, steps + 1)
    t = torch.tensor(times, dtype=torch.float64, device="cpu")
    signal = (flow.path.alpha(t) / flow.path.sigma(t)).tolist()  # to noise; infinite at t = 0
    for i, (now, after) in enumerate(pairwise(times)):
        denoised, eps = flow.split(x, now)
        if after > 0:
            kept = signal[i] / signal[i + 1]
            eps = kept * eps + math.sqrt(1 - kept**2) * noise(i)
        x = flow.path.noised(denoised, eps, times_like(x, after))
        yield after, x


def _uvit_grid(flow: Flow, steps: int) -> list[tuple[float, float]]:
    """U-ViT's time grid 1 .. 1e-3, 0 as (from, to) pairs: `steps` intervals, the last one of 1e-3."""
    return list(pairwise([*linspace(flow.high, FIRST_TIME, steps), 0.0]))


def euler(flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Euler steps on U-ViT's grid."""
    for now, after in _uvit_grid(flow, steps):
        x = x + (now - after) * flow.velocity(x, now)
        yield after, x


def _heun_step(flow: Flow, x: Tensor, now: float, after: float) -> tuple[Tensor, Tensor]:
    """(x at `after`, the velocity there of the Euler step that Heun's step corrects)."""
    slope = flow.velocity(x, now)
    ahead = flow.velocity(x + (now - after) * slope, after)
    return x + 0.5 * (now - after) * (slope + ahead), ahead


def heun(flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Heun steps on U-ViT's grid; the last, to t = 0 where the score has no value, is an Euler step."""
    for now, after in _uvit_grid(flow, steps):
        x = _heun_step(flow, x, now, after)[0] if after > 0 else x + (now - after) * flow.velocity(x, now)
        yield after, x


def heun_throughout(flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """SiT's ODE sampler, equal Heun steps from `flow.high` to `flow.low`: two evaluations each, also the last.

    What is left, where `flow.low` is not 0, is an Euler step along the velocity that is known already.
    """
    times = linspace(flow.high, flow.low, steps + 1)
    for now, after in pairwise(times[:-1]):
        x, _ = _heun_step(flow, x, now, after)
        yield after, x
    x, velocity = _heun_step(flow, x, times[-2], flow.low)
    yield 0.0, x + flow.low * velocity


def dopri5(flow: Flow, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Dormand-Prince 5(4) with torchdiffeq, its steps as long as the tolerances allow; `steps` states are shown.

    One sample after the other: in a batch they would share their steps, and depend on one another.
    """
    times = linspace(flow.high, flow.low, steps + 1)
    states = torch.cat([_dopri5(flow, row[None], times) for row in x], dim=1)
    yield from zip(times[1:-1], states, strict=False)
    yield 0.0, states[-1]


def _dopri5(flow: Flow, x: Tensor, times: list[float]) -> Tensor:
    """The states of one sample at all but the first of `times`; the last is taken on to t = 0 by an Euler step."""
    states = adaptive(lambda state, time: -flow.velocity(state, time), x, times, x.device)[1:]
    if flow.low > 0:
        states[-1] += flow.low * flow.velocity(states[-1], flow.low)
    return states


def adaptive(slope: Callable[[State, float], State], state: State, times: list[float], device: torch.device) -> State:
    """torchdiffeq's dopri5 on d state / dt = slope(state, t): the states at all `times`, stacked."""
    from torchdiffeq import odeint

    grid = torch.tensor(times, dtype=torch.float64, device=device)
    return odeint(
        lambda t, at: slope(at, float(t)),
        state,
        grid,
        rtol=RTOL,
        atol=ATOL,
        method="dopri5",
        options={"step_t": grid[-1:]},  # else it steps beyond
    )
