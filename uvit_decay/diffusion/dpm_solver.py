"""DPM-Solver (Lu et al., 2022): multistep 2M by diffusers, and singlestep of order 3 as in U-ViT's code."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Noise, Trajectory, linspace
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.runtime.constants import LEVELS

GRID = 1000  # levels of the discrete grid to which diffusers' schedulers reduce a continuous path
FAINTEST = 2.0**-24  # alpha^2 of the last level if alpha_1 = 0, as in diffusers' zero-SNR schedules


def dpm_solver(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of DPM-Solver++(2M), Lu et al. (2022), by diffusers; the last step is of first order."""
    from diffusers import DPMSolverMultistepScheduler

    # The scheduler's path preserves the variance: the cumulative product of its 1 - beta is
    # alpha^2 / (alpha^2 + sigma^2), and its states are ours over sqrt(alpha^2 + sigma^2), at t = 0, 1/GRID, ..., 1.
    t = torch.arange(GRID + 1, dtype=torch.float64, device="cpu") / GRID
    alpha2 = denoiser.path.alpha(t).square()
    power = alpha2 + denoiser.path.sigma(t).square()
    signal = (alpha2 / power).clamp(min=FAINTEST)
    betas = (1 - signal[1:] / signal[:-1]).tolist()
    scales = power.sqrt().tolist()
    scheduler = DPMSolverMultistepScheduler(GRID, trained_betas=betas, prediction_type="sample")
    # Distinct, and equally spaced from t = 1; timestep n means t = (n + 1) / GRID.
    timesteps = [round(GRID * (steps - i) / steps) - 1 for i in range(steps)]
    scheduler.set_timesteps(timesteps=timesteps)  # on the CPU, because the scheduler reads their values
    scheduler.set_begin_index(0)
    for now, after in pairwise([*timesteps, -1]):
        denoised, _ = denoiser.denoise(x, min((now + 1) / GRID, denoiser.high))
        preserved = scheduler.step(denoised, now, x / scales[now + 1]).prev_sample
        x = preserved * scales[after + 1]
        yield (after + 1) / GRID, x


LAST_TIME = 1e-4  # the state at this time is returned as the image


def dpm_solver_fast(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of DPM-Solver on noise predictions, equal steps in log-SNR; `steps` network evaluations."""
    orders = _orders(steps)
    ends = torch.tensor([denoiser.high, LAST_TIME], dtype=torch.float64, device="cpu")
    first, last = _log_snr(denoiser.path, ends).tolist()
    grid = linspace(first, last, len(orders) + 1)
    log_snrs = []
    for (start, end), order in zip(pairwise(grid), orders, strict=True):
        log_snrs += linspace(start, end, order + 1)[:-1]
    log_snrs.append(grid[-1])
    times = _times(denoiser.path, log_snrs)
    yield from _run(denoiser, x, times, orders, predicts_x=False)


def dpm_solver_plus_fast(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of DPM-Solver++ on data predictions, with `steps` network evaluations.

    Its steps are equal in time, down to the first level of Stable Diffusion's schedule.
    """
    times = linspace(denoiser.high, 1 / LEVELS, steps + 1)
    yield from _run(denoiser, x, times, _orders(steps), predicts_x=True)


def _orders(steps: int) -> list[int]:
    """Return the orders of the solver's steps, whose sum is `steps`: order 3, and lower orders at the end."""
    last = {0: [2, 1], 1: [1], 2: [2]}[steps % 3]
    return [3] * ((steps - sum(last)) // 3) + last


def _log_snr(path: NoisePath, t: Tensor) -> Tensor:
    """Return log(alpha_t / sigma_t), half the log-SNR."""
    return (path.alpha(t) / path.sigma(t)).log()


def _times(path: NoisePath, log_snrs: list[float]) -> list[float]:
    """Return the times at which the path has these values of `_log_snr`, by bisection."""
    targets = torch.tensor(log_snrs, dtype=torch.float64, device="cpu")
    low = torch.zeros_like(targets)
    high = torch.ones_like(targets)
    for _ in range(60):
        middle = (low + high) / 2
        late = _log_snr(path, middle) < targets
        low = torch.where(late, low, middle)
        high = torch.where(late, middle, high)
    return high.tolist()


def _run(denoiser: Denoiser, x: Tensor, times: list[float], orders: list[int], predicts_x: bool) -> Trajectory:
    """Yield the trajectory over `times`; a step of order n covers n of their intervals. The last time counts as 0."""
    for end, order in zip(accumulate(orders), orders, strict=True):
        group = times[end - order : end + 1]
        states = _step(denoiser, x, group, predicts_x)
        for after, state in zip(group[1:], states, strict=True):
            yield 0.0 if after == times[-1] else after, state
        x = states[-1]


def _step(denoiser: Denoiser, x: Tensor, times: list[float], predicts_x: bool) -> list[Tensor]:
    """Return the states at `times` except the first; the last one is the result of a step of order len(times) - 1.

    With D the noise, and h the increase of log(alpha / sigma), a step is alpha_t / alpha_s x - sigma_t (e^h - 1) D plus
    a correction of its order; with D the data, alpha and sigma are exchanged.
    """
    t = torch.tensor(times, dtype=torch.float64, device="cpu")
    kept = denoiser.path.alpha(t)
    added = denoiser.path.sigma(t)
    if predicts_x:
        kept, added = added, kept
    gains = (kept / added).log()
    increases = gains - gains[0]
    h = increases.tolist()
    growth = torch.expm1(increases).tolist()
    keep = (kept / kept[0]).tolist()
    add = added.tolist()
    states: list[Tensor] = []
    first = _predict(denoiser, x, times[0], predicts_x)
    for i in range(1, len(times)):
        change = growth[i] * first
        # The slope of D over h is a difference to the previous state. The second order uses (e^h - 1) / 2, the third
        # (e^h - 1) / h - 1, as in the authors' code; both are h / 2 + O(h^2).
        if i > 1:
            bend = growth[i] / 2 if len(times) == 3 else growth[i] / h[i] - 1
            ahead = _predict(denoiser, states[-1], times[i - 1], predicts_x)
            change = change + bend * h[i] / h[i - 1] * (ahead - first)
        states.append(keep[i] * x - add[i] * change)
    return states


def _predict(denoiser: Denoiser, x: Tensor, time: float, predicts_x: bool) -> Tensor:
    """Return D at `time`: the data or the noise, with one network evaluation."""
    data, eps = denoiser.denoise(x, time)
    return data if predicts_x else eps
