"""Samplers that run a scheduler of diffusers.

These schedulers assume a variance-preserving path on a grid of GRID levels. Any path becomes one when its states are
divided by sqrt(alpha_t^2 + sigma_t^2). This changes neither x nor the signal-to-noise ratio, and so not the step of
DPM-Solver++.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Noise, Trajectory
from uvit_decay.diffusion.noise_path import NoisePath

GRID = 1000  # levels of the discrete grid to which diffusers' schedulers reduce a continuous path
FAINTEST = 2.0**-24  # alpha^2 of the last level where alpha_1 = 0, as in diffusers' zero-SNR schedules


def _powers(path: NoisePath) -> tuple[Tensor, Tensor]:
    """Return (alpha_t^2, alpha_t^2 + sigma_t^2) at t = 0, 1/GRID, ..., 1 in float64."""
    t = torch.arange(GRID + 1, dtype=torch.float64, device="cpu") / GRID
    alpha2 = path.alpha(t).square()
    return alpha2, alpha2 + path.sigma(t).square()


def _trained_betas(path: NoisePath) -> list[float]:
    """Return the betas whose cumulative product of 1 - beta is alpha^2 / (alpha^2 + sigma^2) on the grid, exactly."""
    alpha2, power = _powers(path)
    signal = (alpha2 / power).clamp(min=FAINTEST)
    return (1 - signal[1:] / signal[:-1]).tolist()


def _timesteps(steps: int) -> list[int]:
    """Return `steps` distinct timesteps of the grid, equally spaced from t = 1; timestep n means t = (n + 1) / GRID."""
    return [round(GRID * (steps - i) / steps) - 1 for i in range(steps)]


def _with_scheduler(scheduler: Any, denoiser: Denoiser, x: Tensor, steps: int) -> Trajectory:
    """Yield the trajectory of one of diffusers' schedulers with prediction type "sample", over `_timesteps`."""
    timesteps = _timesteps(steps)
    scheduler.set_timesteps(timesteps=timesteps)  # on the CPU, since the scheduler reads their values
    scheduler.set_begin_index(0)
    scales = [math.sqrt(power) for power in _powers(denoiser.path)[1].tolist()]
    for now, after in zip(timesteps, [*timesteps[1:], -1], strict=True):
        denoised, _ = denoiser.denoise(x, min((now + 1) / GRID, denoiser.high))
        preserved = scheduler.step(denoised, now, x / scales[now + 1]).prev_sample
        x = preserved * scales[after + 1]
        yield (after + 1) / GRID, x


def dpm_solver(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of DPM-Solver++(2M), Lu et al. (2022), by diffusers; the last step is of first order."""
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(GRID, trained_betas=_trained_betas(denoiser.path), prediction_type="sample")
    yield from _with_scheduler(scheduler, denoiser, x, steps)
