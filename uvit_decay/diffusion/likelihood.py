"""Log-likelihoods by the instantaneous change of variables along the probability flow (Chen et al. 2018).

With dx/dt = -v(x, t) from an image at t = 0 to noise at t = 1, and the noise N(0, I):

    log p_0(x_0) = log N(x_1; 0, I) - integral from 0 to 1 of div v(x_t, t) dt.

The divergence is Hutchinson's estimate z . (dv/dx) z of FFJORD (Grathwohl et al. 2019) with one z of signs for a whole
trajectory, a function of (seed, i): an adaptive solver then sees one smooth right-hand side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.diffusion.flow import Flow, linspace
from uvit_decay.diffusion.generate import Sampling, Source
from uvit_decay.diffusion.ode import adaptive
from uvit_decay.diffusion.path import Batch
from uvit_decay.randomness import uniform

Solver = Literal["heun", "dopri5"]
Rates = tuple[Tensor, Tensor]


def signs(shape: Sequence[int], seed: int, rows: Int64[Tensor, " b"]) -> Float[Tensor, "b ..."]:
    """+1 or -1 with equal chance (Rademacher), (b, *shape), each a function of the seed and its row."""
    return torch.where(uniform("likelihood", seed, rows=rows, shape=shape) < 0.5, -1.0, 1.0)


def standard_normal_log_density(x: Batch) -> Float[Tensor, " b"]:
    """log N(x; 0, I)."""
    return -0.5 * (x.square() + math.log(2 * math.pi)).flatten(1).sum(dim=1)


def _rates(flow: Flow, x: Tensor, z: Tensor, time: float) -> Rates:
    """d/dt of the state, -v, and of the integral of the divergence, z . (dv/dx) z."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        velocity = flow.velocity(x, time)
        (product,) = torch.autograd.grad(velocity, x, grad_outputs=z)
    return -velocity.detach(), (product * z).flatten(1).sum(dim=1)


def _heun(flow: Flow, x: Tensor, z: Tensor, steps: int) -> Rates:
    """(x_1, the integral of the divergence) by equal Heun steps."""
    total = x.new_zeros(len(x))
    for now, after in pairwise(linspace(flow.low, flow.high, steps + 1)):
        move, gain = _rates(flow, x, z, now)
        move_ahead, gain_ahead = _rates(flow, x + (after - now) * move, z, after)
        x = x + 0.5 * (after - now) * (move + move_ahead)
        total = total + 0.5 * (after - now) * (gain + gain_ahead)
    return x, total


def _dopri5(flow: Flow, x: Tensor, z: Tensor, steps: int) -> Rates:
    """The same with torchdiffeq's adaptive steps, whatever `steps`; x is one image."""
    start, times = (x, x.new_zeros(1)), [flow.low, flow.high]
    states, totals = adaptive(lambda state, time: _rates(flow, state[0], z, time), start, times, x.device)
    return states[-1], totals[-1]


def log_likelihood(
    source: Source,
    images: Batch,
    labels: Sequence[int] | None,
    indices: Sequence[int],
    seed: int = 0,
    solver: Solver = "heun",
    steps: int = 100,
) -> Float[Tensor, " b"]:
    """Natural logarithm of the density at each of `images`, whose draw of signs belongs to its index.

    A network that has no value at t = 0 (`sampling_interval`) takes the images for states at its first time, 1e-3.
    Where alpha_1 is not 0, as for VP, the noise is N(0, I) only nearly.
    """
    z = signs(source.shape, seed, torch.tensor(indices).to(images.device)).to(images)
    if solver == "heun":
        x, total = _heun(_plain_flow(source, labels), images, z, steps)
    else:  # one image after the other, lest they share their steps and depend on one another
        flows = [_plain_flow(source, labels and [labels[k]]) for k in range(len(images))]
        parts = [_dopri5(flow, images[k : k + 1], z[k : k + 1], steps) for k, flow in enumerate(flows)]
        x, total = (torch.cat(part) for part in zip(*parts, strict=True))
    return standard_normal_log_density(x) - total


def _plain_flow(source: Source, labels: Sequence[int] | None) -> Flow:
    return source.flow(Sampling(clip=False), labels)


def bits_per_dim(log_density: Float[Tensor, " b"], dims: int, width: float = 1.0) -> Float[Tensor, " b"]:
    """-log2(density x width^dims) / dims; the width of a grey level is 2 / 255 for pixels in [-1, 1]."""
    return -log_density / (dims * math.log(2)) - math.log2(width)
