"""U-ViT's samplers, written from the published equations: our presets of their names make the same images."""

import math
from itertools import pairwise

import pytest
import torch
from small_source import CLASSES, NET, PATH, SHAPE, source

from uvit_decay.diffusion.noise_path import SDDiscrete
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.runtime.random import normal

COUNT = 4
LABELS = [0, 1, 2, CLASSES]


def noise(step):
    """Standard normal, of each step its own."""
    return normal("papers", step, rows=torch.arange(COUNT), shape=SHAPE)


START = noise(2000)


def beta(t):
    return 0.1 + 19.9 * t


def abar(t):
    return math.exp(-(0.1 * t + 9.95 * t**2))


def eps(x, t):
    """Return NET's noise at the time t of U-ViT's SDE."""
    with torch.no_grad():
        return NET(x, torch.full((COUNT,), t), torch.tensor(LABELS))


def ours(name, steps, path=PATH):
    """Sample NET, a network of pixels, with our sampler, as `generate` does."""
    *_, (_, actual) = SAMPLERS[name].run(source(path=path).denoiser(Sampling(name, steps), LABELS), START, steps, noise)
    return actual


def euler_maruyama(steps):
    """Official: dx = (f - g^2 score) dt + g dW backwards on 0 and `steps` times from 1e-3 to 1; last without noise."""
    grid = [0.0, *torch.linspace(1e-3, 1, steps, dtype=torch.float64).tolist()]
    x = START
    for step, (t, before) in enumerate(pairwise(reversed(grid))):
        score = -eps(x, t) / math.sqrt(1 - abar(t))
        dt = before - t
        x = x + (-0.5 * beta(t) * x - beta(t) * score) * dt
        if before > 0:
            x = x + math.sqrt(beta(t) * -dt) * noise(step)
    return x


def test_uvit_em_is_the_official_euler_maruyama():
    expected = euler_maruyama(200)
    assert expected.abs().max() > 2, "clipping would show"
    assert (ours("uvit-em", 200) - expected).abs().max() < 1e-5 * expected.abs().max()


def log_snr(t):
    return 0.5 * math.log(abar(t) / (1 - abar(t)))


def time_of(log_snr):
    """Return the time t for a value of `log_snr`."""
    q = 2 * 19.9 * math.log1p(math.exp(-2 * log_snr))
    return q / ((math.sqrt(0.01 + q) + 0.1) * 19.9)


def on_sde(t):
    return math.sqrt(abar(t)), math.sqrt(1 - abar(t)), log_snr(t)


def singlestep(x, times, model, levels):
    """Compute a step of DPM-Solver of order len(times) - 1 (Lu et al. 2022, Algorithms 1 and 2).

    `levels` gives alpha, sigma and half the log-SNR. With sigma, alpha, the log-SNR's negative, and a network of data
    it is DPM-Solver++ (Lu et al. 2022b).
    """
    alphas, sigmas, places = zip(*map(levels, times), strict=True)
    h, first = places[-1] - places[0], model(x, times[0])
    r = [(place - places[0]) / h for place in places]

    def along_first(k):
        return alphas[k] / alphas[0] * x - sigmas[k] * math.expm1(r[k] * h) * first

    if len(times) == 2:
        return along_first(1)
    d1 = model(along_first(1), times[1]) - first
    if len(times) == 3:
        return along_first(2) - sigmas[2] * math.expm1(h) / (2 * r[1]) * d1
    u = along_first(2) - sigmas[2] * r[2] / r[1] * (math.expm1(r[2] * h) / (r[2] * h) - 1) * d1
    d2 = model(u, times[2]) - first
    return along_first(3) - sigmas[3] / r[2] * (math.expm1(h) / h - 1) * d2


def dpm_solver_fast(steps):
    """Official: intervals equal in log-SNR from t = 1 to 1e-4, of third order until few evaluations are left."""
    count = steps // 3 + 1
    orders = {0: [3] * (count - 2) + [2, 1], 1: [3] * (count - 1) + [1], 2: [3] * (count - 1) + [2]}[steps % 3]
    ends = [time_of(value) for value in torch.linspace(log_snr(1), log_snr(1e-4), count + 1, dtype=torch.float64)]
    x = START
    for order, (s, t) in zip(orders, pairwise(ends), strict=True):
        inner = [time_of(log_snr(s) + k / order * (log_snr(t) - log_snr(s))) for k in range(1, order)]
        x = singlestep(x, [s, *inner, t], eps, on_sde)
    return x


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 48, 49, 50])
def test_uvit_dpm_is_the_official_dpm_solver(steps):
    expected = dpm_solver_fast(steps)
    assert expected.abs().max() > 2, "clipping would show"
    assert (ours("uvit-dpm", steps) - expected).abs().max() < 1e-5 * expected.abs().max()


SD = SDDiscrete()  # of U-ViT-H
BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
LOG_ALPHAS = torch.cat([torch.zeros(1), 0.5 * torch.log1p(-BETAS).cumsum(0)]).tolist()


def on_levels(t):
    """Return (alpha, sigma, half the log-SNR), log alpha linear between the levels."""
    n = min(int(1000 * t), 999)
    log_alpha = LOG_ALPHAS[n] + (1000 * t - n) * (LOG_ALPHAS[n + 1] - LOG_ALPHAS[n])
    sigma = math.sqrt(1 - math.exp(2 * log_alpha))
    return math.exp(log_alpha), sigma, log_alpha - math.log(sigma)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 48, 49, 50])
def test_uvit_dpm_plus_is_the_official_dpm_solver_plus_of_the_huge_networks(steps):
    def data(x, t):
        alpha, sigma, _ = on_levels(t)
        return (x - sigma * eps(x, t)) / alpha

    def turned(t):
        alpha, sigma, half_log_snr = on_levels(t)
        return sigma, alpha, -half_log_snr

    expected = START
    grid = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64).tolist()
    at = 0
    while at < steps:
        order = min(3, steps - at) if steps - at != 3 else 2  # three evaluations that are left are 2 + 1
        expected = singlestep(expected, grid[at : at + order + 1], data, turned)
        at += order
    assert expected.abs().max() > 2, "clipping would show"
    assert (ours("uvit-dpm++", steps, SD) - expected).abs().max() < 1e-5 * expected.abs().max()
