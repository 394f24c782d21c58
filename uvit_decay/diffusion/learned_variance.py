"""DDPM with a learned variance on respaced levels (Nichol & Dhariwal 2021), as DiT samples (Peebles & Xie 2023).

The network returns eps and v in about [-1, 1] at the levels of a discrete path. From the level t to the level s < t,

    x_s = posterior mean(x, x_t) + exp(l / 2) z,  l = f log beta + (1 - f) log beta~,  f = (v + 1) / 2,

with beta = 1 - alpha_t^2 / alpha_s^2 and the posterior's variance beta~ = beta sigma_s^2 / sigma_t^2.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from uvit_decay.diffusion.denoiser import Denoiser, Noise, Trajectory
from uvit_decay.diffusion.noise_path import LEVELS


def respaced_levels(steps: int) -> list[int]:
    """Return `steps` >= 2 of the levels 1 .. LEVELS, rising, with both ends: improved-diffusion's `space_timesteps`."""
    stride, place, levels = (LEVELS - 1) / (steps - 1), 0.0, []
    for _ in range(steps):
        levels.append(1 + round(place))
        place += stride  # a sum, as there, since products round otherwise
    return levels


def dit_ddpm(denoiser: Denoiser, x: Tensor, steps: int, noise: Noise) -> Trajectory:
    """Yield the trajectory of ancestral sampling with the learned variance; the last step adds no noise.

    diffusers' DDPMScheduler is not used: it searches its timesteps on the device, and so waits for it.
    """
    times = [level / LEVELS for level in reversed(respaced_levels(steps))] + [0.0]
    abar = denoiser.path.alpha(torch.tensor(times, dtype=torch.float64, device="cpu")).square().tolist()
    for i, (now, after) in enumerate(pairwise(times)):
        data, _, v = denoiser.evaluate(x, now)
        beta = 1 - abar[i] / abar[i + 1]
        of_data = math.sqrt(abar[i + 1]) * beta / (1 - abar[i])
        of_state = math.sqrt(1 - beta) * (1 - abar[i + 1]) / (1 - abar[i])
        x = of_data * data + of_state * x
        if after > 0:
            share, smallest = (v + 1) / 2, math.log(beta * (1 - abar[i + 1]) / (1 - abar[i]))
            log_variance = share * math.log(beta) + (1 - share) * smallest
            x = x + (0.5 * log_variance).exp() * noise(i)
        yield after, x
