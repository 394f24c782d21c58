"""The samplers that diffusers has too, against its schedulers."""

import itertools
import math
from functools import partial

import pytest
import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from sampler_cases import MEAN, PATH, STD, gaussian, run, start
from small_source import NET, SHAPE

from uvit_decay.diffusion.noise_path import Linear

STEPS = pytest.mark.parametrize("steps", [5, 20, 50])


def eps_of(x_t, t):
    """Return a noise prediction that is neither linear nor local."""
    return NET(x_t, t, torch.zeros(len(x_t), dtype=torch.int64))


def scheduler_of(kind, steps, **options):
    """Return a scheduler of diffusers with U-ViT's levels, and for each step its number and the time."""
    abar = [math.exp(-(0.1 * t + 9.95 * t**2)) for t in (i / 1000 for i in range(1001))]
    scheduler = kind(1000, trained_betas=[1 - after / before for before, after in itertools.pairwise(abar)], **options)
    scheduler.set_timesteps(timesteps=[round(1000 * (1 - i / steps)) - 1 for i in range(steps)])
    return scheduler, [(n, torch.full((3,), (n + 1) / 1000)) for n in scheduler.timesteps.tolist()]


@STEPS
def test_dpm_solver_is_the_one_of_diffusers_with_noise_prediction(steps):
    options = {"prediction_type": "epsilon", "algorithm_type": "dpmsolver++", "solver_order": 2}
    scheduler, grid = scheduler_of(DPMSolverMultistepScheduler, steps, **options)
    expected = x = start((3, *SHAPE))
    for n, t in grid:
        expected = scheduler.step(eps_of(expected, t), n, expected).prev_sample

    def denoise(x_t, t):
        eps = eps_of(x_t, t)
        return PATH.x_from_eps(x_t, eps, t), eps

    actual = run("dpm++", denoise, x, steps)[-1][1]
    assert expected.std() > 0.1
    assert torch.allclose(actual, expected, atol=2e-3 * expected.abs().max().item())


def test_dpm_solver_on_the_linear_path_is_the_one_of_diffusers_for_flows():
    """Diffusers' grid starts at 0.999 instead of 1, so that only the later steps are equal."""
    x, denoise = start((3, 1, 4, 4)), partial(gaussian, path=Linear())
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)
    scheduler.set_timesteps(100)
    expected = x
    for sigma, timestep in zip(scheduler.sigmas[:-1].tolist(), scheduler.timesteps, strict=True):
        data, eps = denoise(expected, torch.full((3,), sigma))
        expected = scheduler.step(eps - data, timestep, expected).prev_sample
    actual = run("dpm++", denoise, x, 100, path=Linear())[-1][1]
    assert torch.allclose(actual, expected, atol=5e-3)
    assert torch.allclose(actual, MEAN + STD * x, atol=2e-2)


@STEPS
def test_ddpm_is_the_one_of_diffusers(steps):
    scheduler, grid = scheduler_of(DDPMScheduler, steps, prediction_type="sample", clip_sample=False)
    expected = x = start((3, 3, 6, 6))
    theirs, ours = (torch.Generator().manual_seed(1) for _ in range(2))
    for n, t in grid:
        expected = scheduler.step(gaussian(expected, t)[0], n, expected, generator=theirs).prev_sample
    actual = run("ddpm", gaussian, x, steps, lambda step: torch.randn(x.shape, generator=ours))[-1][1]
    assert torch.allclose(actual, expected, atol=1e-3)
