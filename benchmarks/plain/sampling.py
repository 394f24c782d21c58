"""Samplers as plain loops: DDIM of U-ViT, Heun's method and Euler-Maruyama of SiT; guidance takes two forward passes.

`noise(i)` is the standard normal noise of step i; time is the one of the network's code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Noise = Callable[[int], Tensor]
Field = Callable[[Tensor, float], Tensor]


def guided(net: nn.Module, y: Tensor, null: int, scale: float, time_scale: float = 1.0) -> Field:
    """Return the output of the network for states and a time; with guidance two calls, one without labels."""

    def output(x: Tensor, time: float) -> Tensor:
        t = time_scale * torch.ones(x.shape[0], device=x.device) * time
        conditional = net(x, t, y)
        if scale == 1.0:
            return conditional
        unconditional = net(x, t, torch.full_like(y, null))
        return unconditional + scale * (conditional - unconditional)

    return output


def vp(t: float) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma of U-ViT's path at time t, 0 data and 1 noise."""
    log_alpha = torch.tensor(-0.25 * t**2 * (20 - 0.1) - 0.5 * t * 0.1)
    return torch.exp(log_alpha), torch.sqrt(-torch.expm1(2 * log_alpha))


def ddim(eps: Field, x: Tensor, steps: int, noise: Noise) -> Tensor:
    times = torch.linspace(1, 0, steps + 1)
    for now, after in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        (alpha, sigma), (alpha_s, sigma_s) = vp(now), vp(after)
        found = eps(x, now)
        denoised = (x - sigma * found) / alpha
        x = alpha_s * denoised + sigma_s * found
    return x


def heun(velocity: Field, x: Tensor, steps: int, noise: Noise) -> Tensor:
    """Integrate the ODE of SiT from its time 0, noise, to 1."""
    times = torch.linspace(0, 1, steps + 1).tolist()
    for now, after in zip(times[:-1], times[1:], strict=True):
        first = velocity(x, now)
        second = velocity(x + (after - now) * first, after)
        x = x + (after - now) * (first + second) / 2
    return x


def euler_maruyama(velocity: Field, x: Tensor, steps: int, noise: Noise, last: float = 0.04) -> Tensor:
    """Integrate SiT's SDE with diffusion sigma, then along its drift to the end; drift and score call the network."""

    def score(x: Tensor, t: float) -> Tensor:
        return (t * velocity(x, t) - x) / (1 - t)

    def drift(x: Tensor, t: float) -> Tensor:
        return velocity(x, t) + (1 - t) * score(x, t)

    times = torch.linspace(0, 1 - last, steps).tolist()
    for i, (now, after) in enumerate(zip(times[:-1], times[1:], strict=True)):
        h = after - now
        x = x + h * drift(x, now) + (2 * h * (1 - now)) ** 0.5 * noise(i)
    return x + last * drift(x, times[-1])
