"""Samplers: noise to image, each a generator that yields (t, x_t) after every step, ending at t = 0.

Entries of SAMPLERS take a denoiser (x_t, t) -> (x, eps), the path, x_1, the number of steps, and one torch.Generator
for each sample, so that a stochastic sampler draws the same noise for a sample whatever its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uvit_decay.diffusion.path import Path, expand

Denoiser = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Generators = list[torch.Generator]
Trajectory = Iterator[tuple[float, Tensor]]

GRID = 1000  # steps of the discrete grid on which diffusers' schedulers see a continuous path
FIRST_TIME = 1e-3  # the last time before 0 at which U-ViT's SDE and ODE samplers call the network


@dataclass(frozen=True)
class Sampler:
    """`run` makes the trajectory in `steps` steps; `evaluations(steps)` network calls for each sample."""

    run: Callable[[Denoiser, Path, Tensor, int, Generators], Trajectory]
    evaluations: Callable[[int], int]
    stochastic: bool


def normal_like(x: Tensor, generators: Generators) -> Tensor:
    """Standard normal noise, row i from generators[i]."""
    rows = [torch.randn(x.shape[1:], generator=g, device=g.device) for g in generators]
    return torch.stack(rows).to(x)


def _times(path_time: float, x: Tensor) -> Tensor:
    return torch.full((len(x),), path_time, device=x.device, dtype=torch.float32)


def _trained_betas(path: Path) -> list[float]:
    """Discrete betas whose cumulative product is alpha_t^2 exactly at t = 1/GRID, 2/GRID, ..., 1."""
    t = torch.arange(GRID + 1, dtype=torch.float64) / GRID
    alpha2 = path.alpha(t).square()
    return (1 - alpha2[1:] / alpha2[:-1]).tolist()


def _timesteps(steps: int) -> list[int]:
    """`steps` distinct timesteps of the grid, equally spaced from t = 1: timestep n stands for t = (n + 1) / GRID."""
    return [round(GRID * (steps - i) / steps) - 1 for i in range(steps)]


def _with_scheduler(scheduler: Any, denoise: Denoiser, x: Tensor, steps: int, **step_options: Any) -> Trajectory:
    """Run one of diffusers' schedulers, which is given the denoised image, over `_timesteps`."""
    timesteps = _timesteps(steps)
    scheduler.set_timesteps(timesteps=timesteps, device=x.device)
    for now, after in zip(timesteps, [*timesteps[1:], -1], strict=True):
        denoised, _ = denoise(x, _times((now + 1) / GRID, x))
        x = scheduler.step(denoised, now, x, **step_options).prev_sample
        yield (after + 1) / GRID, x


def dpm_solver(denoise: Denoiser, path: Path, x: Tensor, steps: int, generators: Generators) -> Trajectory:
    """DPM-Solver++(2M) of Lu et al. (2022), diffusers' DPMSolverMultistepScheduler; the last step is of first order."""
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(GRID, trained_betas=_trained_betas(path), prediction_type="sample")
    yield from _with_scheduler(scheduler, denoise, x, steps)


def ddpm(denoise: Denoiser, path: Path, x: Tensor, steps: int, generators: Generators) -> Trajectory:
    """Ancestral sampling of Ho et al. (2020) with the posterior variance, diffusers' DDPMScheduler."""
    from diffusers import DDPMScheduler

    betas = _trained_betas(path)
    scheduler = DDPMScheduler(GRID, trained_betas=betas, prediction_type="sample", clip_sample=False)
    yield from _with_scheduler(scheduler, denoise, x, steps, generator=generators)


def ddim(denoise: Denoiser, path: Path, x: Tensor, steps: int, generators: Generators) -> Trajectory:
    """DDIM of Song et al. (2021), eta = 0: x_s = alpha_s x + sigma_s eps, in equal steps from t = 1.

    Not diffusers' DDIMScheduler: it moves x by GRID // steps whatever the timesteps, so most step counts miss t = 0.
    """
    for i in range(steps):
        denoised, eps = denoise(x, _times(1 - i / steps, x))
        after = 1 - (i + 1) / steps
        x = path.noised(denoised, eps, _times(after, x))
        yield after, x


def _grid(steps: int) -> list[tuple[float, float]]:
    """U-ViT's time grid 1 .. 1e-3, 0 as (from, to) pairs: `steps` intervals, the last one of 1e-3."""
    times = [*torch.linspace(1.0, FIRST_TIME, steps, dtype=torch.float64).tolist(), 0.0]
    return list(zip(times[:-1], times[1:], strict=True))


def euler_maruyama(denoise: Denoiser, path: Path, x: Tensor, steps: int, generators: Generators) -> Trajectory:
    """Reverse SDE dx = (f x - g^2 score) dt + g dW, no noise on the last interval; 1000 steps for U-ViT's CIFAR."""
    for now, after in _grid(steps):
        t = _times(now, x)
        _, eps = denoise(x, t)
        g2 = expand(path.diffusion2(t), x)
        x = x + (expand(path.drift(t), x) * x - g2 * path.score(eps, t)) * (after - now)
        if after > 0:
            x = x + (g2 * (now - after)).sqrt() * normal_like(x, generators)
        yield after, x


def _ode_slope(denoise: Denoiser, path: Path, x: Tensor, now: float) -> Tensor:
    """Probability-flow ODE dx/dt = f x - g^2 score / 2."""
    t = _times(now, x)
    _, eps = denoise(x, t)
    return expand(path.drift(t), x) * x - 0.5 * expand(path.diffusion2(t), x) * path.score(eps, t)


def euler(denoise: Denoiser, path: Path, x: Tensor, steps: int, generators: Generators) -> Trajectory:
    """Euler steps of the probability-flow ODE."""
    for now, after in _grid(steps):
        x = x + _ode_slope(denoise, path, x, now) * (after - now)
        yield after, x


def heun(denoise: Denoiser, path: Path, x: Tensor, steps: int, generators: Generators) -> Trajectory:
    """Heun steps of the probability-flow ODE; the last, to t = 0 where the score has no value, is an Euler step."""
    for now, after in _grid(steps):
        slope = _ode_slope(denoise, path, x, now)
        ahead = x + slope * (after - now)
        if after > 0:
            slope = 0.5 * (slope + _ode_slope(denoise, path, ahead, after))
        x = x + slope * (after - now)
        yield after, x


def _one_each(steps: int) -> int:
    return steps


def _two_each(steps: int) -> int:
    return 2 * steps - 1


SAMPLERS: dict[str, Sampler] = {
    # name               trajectory      evaluations  stochastic
    "dpm++": Sampler(dpm_solver, _one_each, False),
    "ddim": Sampler(ddim, _one_each, False),
    "ddpm": Sampler(ddpm, _one_each, True),
    "euler-maruyama": Sampler(euler_maruyama, _one_each, True),
    "euler": Sampler(euler, _one_each, False),
    "heun": Sampler(heun, _two_each, False),
}
