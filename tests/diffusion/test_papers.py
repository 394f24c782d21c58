"""What U-ViT samples with, written here from its published equations: our presets of its name make the same images."""

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
    """NET's noise at the time t of U-ViT's SDE."""
    with torch.no_grad():
        return NET(x, torch.full((COUNT,), t), torch.tensor(LABELS))


def ours(name, steps, path=PATH):
    """What our sampler makes of NET, a network of pixels, as `generate` would."""
    *_, (_, actual) = SAMPLERS[name].run(source(path=path).denoiser(Sampling(name, steps), LABELS), START, steps, noise)
    return actual


def euler_maruyama(steps):
    """Official: dx = (f - g^2 score) dt + g dW backwards on {0} and `steps` times from 1e-3 to 1, no noise at last."""
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
    """Its inverse on U-ViT's SDE."""
    q = 2 * 19.9 * math.log1p(math.exp(-2 * log_snr))
    return q / ((math.sqrt(0.01 + q) + 0.1) * 19.9)


def third(x, s, t, eps, r1=1 / 3, r2=2 / 3):
    """DPM-Solver-3, Algorithm 2 of Lu et al. (2022), from the time s to t."""
    h = log_snr(t) - log_snr(s)
    s1, s2 = time_of(log_snr(s) + r1 * h), time_of(log_snr(s) + r2 * h)
    sigma = {time: math.sqrt(1 - abar(time)) for time in (s1, s2, t)}
    first = eps(x, s)
    u = math.sqrt(abar(s1) / abar(s)) * x - sigma[s1] * math.expm1(r1 * h) * first
    d1 = eps(u, s1) - first
    u = math.sqrt(abar(s2) / abar(s)) * x - sigma[s2] * math.expm1(r2 * h) * first
    u = u - sigma[s2] * r2 / r1 * (math.expm1(r2 * h) / (r2 * h) - 1) * d1
    d2 = eps(u, s2) - first
    x = math.sqrt(abar(t) / abar(s)) * x - sigma[t] * math.expm1(h) * first
    return x - sigma[t] / r2 * (math.expm1(h) / h - 1) * d2


def second(x, s, t, eps, r1=1 / 2):
    """DPM-Solver-2, Algorithm 1."""
    h = log_snr(t) - log_snr(s)
    s1 = time_of(log_snr(s) + r1 * h)
    first = eps(x, s)
    u = math.sqrt(abar(s1) / abar(s)) * x - math.sqrt(1 - abar(s1)) * math.expm1(r1 * h) * first
    d1 = eps(u, s1) - first
    x = math.sqrt(abar(t) / abar(s)) * x - math.sqrt(1 - abar(t)) * math.expm1(h) * first
    return x - math.sqrt(1 - abar(t)) * math.expm1(h) / (2 * r1) * d1


def first(x, s, t, eps):
    """DPM-Solver-1."""
    h = log_snr(t) - log_snr(s)
    return math.sqrt(abar(t) / abar(s)) * x - math.sqrt(1 - abar(t)) * math.expm1(h) * eps(x, s)


def dpm_solver_fast(steps):
    """Official: intervals equal in log-SNR from t = 1 to 1e-4, of third order until few evaluations are left."""
    count = steps // 3 + 1
    orders = {0: [3] * (count - 2) + [2, 1], 1: [3] * (count - 1) + [1], 2: [3] * (count - 1) + [2]}[steps % 3]
    ends = [time_of(value) for value in torch.linspace(log_snr(1), log_snr(1e-4), count + 1, dtype=torch.float64)]
    x = START
    for order, (s, t) in zip(orders, pairwise(ends), strict=True):
        x = {1: first, 2: second, 3: third}[order](x, s, t, eps)
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
    """(alpha, sigma, half the log-SNR), log alpha linear between the levels."""
    n = min(int(1000 * t), 999)
    log_alpha = LOG_ALPHAS[n] + (1000 * t - n) * (LOG_ALPHAS[n + 1] - LOG_ALPHAS[n])
    sigma = math.sqrt(1 - math.exp(2 * log_alpha))
    return math.exp(log_alpha), sigma, log_alpha - math.log(sigma)


def plus_step(x, times, data):
    """Singlestep DPM-Solver++ of order len(times) - 1 (Lu et al. 2022b): from times[0] to times[-1]."""
    (_, sigma_s, start), (alpha_t, sigma_t, end) = on_levels(times[0]), on_levels(times[-1])
    h = end - start
    x_s = data(x, times[0])
    moved = sigma_t / sigma_s * x - alpha_t * math.expm1(-h) * x_s
    if len(times) == 2:
        return moved
    alpha_1, sigma_1, middle = on_levels(times[1])
    r1 = (middle - start) / h
    u = sigma_1 / sigma_s * x - alpha_1 * math.expm1(-r1 * h) * x_s
    d1 = data(u, times[1]) - x_s
    if len(times) == 3:
        return moved - alpha_t * math.expm1(-h) / (2 * r1) * d1
    alpha_2, sigma_2, later = on_levels(times[2])
    r2 = (later - start) / h
    u = sigma_2 / sigma_s * x - alpha_2 * math.expm1(-r2 * h) * x_s
    u = u + r2 / r1 * alpha_2 * (math.expm1(-r2 * h) / (r2 * h) + 1) * d1
    d2 = data(u, times[2]) - x_s
    return moved + alpha_t / r2 * (math.expm1(-h) / h + 1) * d2


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 48, 49, 50])
def test_uvit_dpm_plus_is_the_official_dpm_solver_plus_of_the_huge_networks(steps):
    def data(x, t):
        alpha, sigma, _ = on_levels(t)
        return (x - sigma * eps(x, t)) / alpha

    expected = START
    grid = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64).tolist()
    at = 0
    while at < steps:
        order = min(3, steps - at) if steps - at != 3 else 2  # three evaluations that are left are 2 + 1
        expected = plus_step(expected, grid[at : at + order + 1], data)
        at += order
    assert expected.abs().max() > 2, "clipping would show"
    assert (ours("uvit-dpm++", steps, SD) - expected).abs().max() < 1e-5 * expected.abs().max()
