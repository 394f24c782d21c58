"""DPM-Solver++(2M) by diffusers' DPMSolverMultistepScheduler.

diffusers' schedulers assume a variance-preserving path on a grid of GRID levels. Any path becomes one when its states
are divided by sqrt(alpha_t^2 + sigma_t^2). This changes neither x nor the signal-to-noise ratio, and so not the step of
DPM-Solver++.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Noise, Trajectory
from uvit_decay.diffusion.noise_path import NoisePath

GRID = 1000  # levels of the discrete grid to which diffusers' schedulers reduce a continuous path
FAINTEST = 2.0**-24  # alpha^2 of the last level where alpha_1 = 0, as in diffusers' zero-SNR schedules


def _preserving(path: NoisePath) -> tuple[list[float], list[float]]:
    """Return the path of diffusers' scheduler in float64: its betas, and the factors between its states and ours.

    The cumulative product of 1 - beta is alpha^2 / (alpha^2 + sigma^2) at t = 1/GRID, ..., 1; the factors are
    sqrt(alpha^2 + sigma^2) at t = 0, 1/GRID, ..., 1.
    """
    t = torch.arange(GRID + 1, dtype=torch.float64, device="cpu") / GRID
    alpha2 = path.alpha(t).square()
    power = alpha2 + path.sigma(t).square()
    signal = (alpha2 / power).clamp(min=FAINTEST)
    return (1 - signal[1:] / signal[:-1]).tolist(), power.sqrt().tolist()


def _timesteps(steps: int) -> list[int]:
    """Return `steps` distinct timesteps of the grid, equally spaced from t = 1; timestep n means t = (n + 1) / GRID."""
    return [round(GRID * (steps - i) / steps) - 1 for i in range(steps)]


def dpm_solver(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of DPM-Solver++(2M), Lu et al. (2022), by diffusers; the last step is of first order."""
    from diffusers import DPMSolverMultistepScheduler

    betas, scales = _preserving(denoiser.path)
    scheduler = DPMSolverMultistepScheduler(GRID, trained_betas=betas, prediction_type="sample")
    timesteps = _timesteps(steps)
    scheduler.set_timesteps(timesteps=timesteps)  # on the CPU, since the scheduler reads their values
    scheduler.set_begin_index(0)
    for now, after in zip(timesteps, [*timesteps[1:], -1], strict=True):
        denoised, _ = denoiser.denoise(x, min((now + 1) / GRID, denoiser.high))
        preserved = scheduler.step(denoised, now, x / scales[now + 1]).prev_sample
        x = preserved * scales[after + 1]
        yield (after + 1) / GRID, x
