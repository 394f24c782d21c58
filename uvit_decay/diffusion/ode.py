"""Samplers that integrate the probability-flow ODE dx/dt = -v(x, t) from noise to data, or its exponential form (DDIM).

They use the velocity, which is finite at t = 1, where the drift of a linear or GVP path is infinite. DDPM is included
because it is DDIM with noise, and DiT's sampler because it is DDPM with a learned variance.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise, repeat

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Noise, Trajectory, linspace, times_like
from uvit_decay.diffusion.prediction import T_EPS
from uvit_decay.runtime.constants import LEVELS

ATOL, RTOL = 1e-6, 1e-3  # tolerances of dopri5, as in SiT


def ddim(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of DDIM (Song et al. 2021; eta = 0), x_s = alpha_s x + sigma_s eps, in equal steps.

    diffusers' DDIMScheduler is not used: it always moves x by GRID // steps, so with most step counts it misses t = 0.
    """
    for now, after in pairwise(linspace(denoiser.high, 0.0, steps + 1)):
        denoised, eps = denoiser.denoise(x, now)
        x = denoiser.path.add_noise(denoised, eps, times_like(x, after))
        yield after, x


def ddpm(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of ancestral sampling (Ho et al. 2020), x_s ~ p(x_s | x, x_t), with the steps of `ddim`.

    The posterior is the step of DDIM with eps replaced by r eps + sqrt(1 - r^2) z, where z is new noise and
    r = (alpha_t / sigma_t) / (alpha_s / sigma_s). diffusers' DDPMScheduler is not used, because it searches its
    timesteps on the device and so waits for the device.
    """
    times = linspace(denoiser.high, 0.0, steps + 1)
    t = torch.tensor(times, dtype=torch.float64, device="cpu")
    signal = (denoiser.path.alpha(t) / denoiser.path.sigma(t)).tolist()  # signal-to-noise ratio, infinite at t = 0
    for i, (now, after) in enumerate(pairwise(times)):
        denoised, eps = denoiser.denoise(x, now)
        if after > 0:
            kept = signal[i] / signal[i + 1]
            eps = kept * eps + math.sqrt(1 - kept**2) * noise(i)
        x = denoiser.path.add_noise(denoised, eps, times_like(x, after))
        yield after, x


def respace_levels(steps: int) -> list[int]:
    """Return `steps` >= 2 of the levels 1 .. LEVELS, rising, with both ends: improved-diffusion's `space_timesteps`."""
    strides = repeat((LEVELS - 1) / (steps - 1), steps - 1)
    places = accumulate(strides, initial=0.0)  # sums as in the original, because products would be rounded differently
    return [1 + round(place) for place in places]


def dit_ddpm(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of DiT's sampler (Peebles & Xie 2023): DDPM with a learned variance on respaced levels.

    The network returns eps and v in about [-1, 1] at the levels of a discrete path. From the level t to s < t,

        x_s = posterior mean(x, x_t) + exp(l / 2) z,  l = f log beta + (1 - f) log beta~,  f = (v + 1) / 2,

    with beta = 1 - alpha_t^2 / alpha_s^2 and the posterior's variance beta~ = beta sigma_s^2 / sigma_t^2.
    The last step adds no noise (Nichol & Dhariwal 2021).
    """
    times = [level / LEVELS for level in reversed(respace_levels(steps))]
    times.append(0.0)
    t = torch.tensor(times, dtype=torch.float64, device="cpu")
    abar = denoiser.path.alpha(t).square().tolist()
    for i, (now, after) in enumerate(pairwise(times)):
        data, _, v = denoiser.evaluate(x, now)
        # The posterior between neighbours of the respaced grid: beta of the whole interval, not of one level.
        beta = 1 - abar[i] / abar[i + 1]
        of_data = math.sqrt(abar[i + 1]) * beta / (1 - abar[i])
        of_state = math.sqrt(1 - beta) * (1 - abar[i + 1]) / (1 - abar[i])
        x = of_data * data + of_state * x
        if after > 0:
            # v interpolates between the logarithms of both bounds of the variance; at the last step beta~ is 0.
            share = (v + 1) / 2
            smallest = math.log(beta * (1 - abar[i + 1]) / (1 - abar[i]))
            log_variance = share * math.log(beta) + (1 - share) * smallest
            x = x + (0.5 * log_variance).exp() * noise(i)
        yield after, x


def _uvit_grid(denoiser: Denoiser, steps: int) -> list[tuple[float, float]]:
    """Return U-ViT's time grid 1 .. 1e-3, 0 as (from, to) pairs: `steps` intervals, the last of length 1e-3."""
    times = linspace(denoiser.high, T_EPS, steps)
    return list(pairwise([*times, 0.0]))


def euler(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of Euler steps on U-ViT's grid."""
    for now, after in _uvit_grid(denoiser, steps):
        x = x + (now - after) * denoiser.velocity(x, now)
        yield after, x


def _heun_step(denoiser: Denoiser, x: Tensor, now: float, after: float) -> tuple[Tensor, Tensor]:
    """Return x at `after` by a Heun step, and the velocity at the Euler prediction that the step corrects."""
    slope = denoiser.velocity(x, now)
    ahead = denoiser.velocity(x + (now - after) * slope, after)
    return x + 0.5 * (now - after) * (slope + ahead), ahead


def heun(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of Heun steps on U-ViT's grid; the last is an Euler step, because t = 0 has no score."""
    for now, after in _uvit_grid(denoiser, steps):
        if after > 0:
            x, _ = _heun_step(denoiser, x, now, after)
        else:
            x = x + (now - after) * denoiser.velocity(x, now)
        yield after, x


def heun_throughout(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of SiT's ODE sampler: equal Heun steps, of two evaluations, from `high` to `low`.

    If `denoiser.low` is not 0, an Euler step with the last computed velocity leads to t = 0 without an evaluation.
    """
    times = linspace(denoiser.high, denoiser.low, steps + 1)
    for now, after in pairwise(times[:-1]):
        x, _ = _heun_step(denoiser, x, now, after)
        yield after, x
    x, velocity = _heun_step(denoiser, x, times[-2], denoiser.low)
    yield 0.0, x + denoiser.low * velocity


def dopri5(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield `steps` states of the trajectory of Dormand-Prince 5(4) by torchdiffeq, which chooses the steps itself.

    The samples of a batch would share their steps and depend on one another, so x has one sample.
    """
    from torchdiffeq import odeint

    times = linspace(denoiser.high, denoiser.low, steps + 1)
    grid = torch.tensor(times, dtype=torch.float64, device=x.device)

    def slope(t: Tensor, state: Tensor) -> Tensor:
        return -denoiser.velocity(state, float(t))

    # step_t ends a step at the last time, beyond which dopri5 would evaluate the slope.
    options = {"step_t": grid[-1:]}
    states = odeint(slope, x, grid, rtol=RTOL, atol=ATOL, method="dopri5", options=options)[1:]
    yield from zip(times[1:-1], states, strict=False)
    if denoiser.low > 0:
        states[-1] += denoiser.low * denoiser.velocity(states[-1], denoiser.low)
    yield 0.0, states[-1]
