"""DiT's sampler against diffusers' DDPMScheduler with learned_range, and what it refuses."""

import fractions
from dataclasses import replace

import pytest
import torch
from diffusers import DDPMScheduler
from refusals import raises_user_error
from sampler_cases import noise_of, start
from sit_reference import loaded

from uvit_decay.diffusion.denoiser import Denoiser
from uvit_decay.diffusion.noise_path import VP, DDPMLinear, SDDiscrete
from uvit_decay.diffusion.ode import dit_ddpm, respace_levels
from uvit_decay.diffusion.sampling import ClassifierFree, DiffusionModel, Sampling, generate

PATH, CPU = DDPMLinear(), torch.device("cpu")


def output(x, t):
    """Return an output that depends on the state and the time: eps, and v beyond [-1, 1] too."""
    phase = 3 * t.reshape(-1, 1, 1, 1)
    return torch.cat([0.7 * x + 0.3 * torch.sin(x + phase), 1.2 * torch.cos(2 * x - phase)], dim=1)


def denoise(x, t):
    eps, v = output(x, t).chunk(2, dim=1)
    return PATH.x_from_eps(x, eps, t), eps, v


def dit(learned_variance=True):
    """Return a small DiT with random weights in every layer."""
    return loaded(depth=2, time="dit", learn_sigma=True, learned_variance=learned_variance).eval().requires_grad_(False)


def model(net, path=PATH):
    return DiffusionModel.from_net(net, path, "eps", CPU, pixels=False)


@pytest.mark.parametrize("steps", [2, 3, 10, 250, 1000])
def test_respaced_levels_are_those_of_equal_fractional_steps(steps):
    levels = respace_levels(steps)
    exact = [fractions.Fraction(999 * i, steps - 1) for i in range(steps)]
    assert (levels[0], levels[-1], len(set(levels))) == (1, 1000, steps)
    assert all(abs(level - 1 - place) <= fractions.Fraction(1, 2) for level, place in zip(levels, exact, strict=True))


@pytest.mark.parametrize("steps", [2, 10, 250, 1000])
def test_trajectories_are_those_of_diffusers_scheduler(steps, monkeypatch):
    scheduler = DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02, variance_type="learned_range", clip_sample=False)
    scheduler.alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    scheduler.one = torch.ones((), dtype=torch.float64)
    scheduler.set_timesteps(timesteps=[level - 1 for level in reversed(respace_levels(steps))])
    x = start((3, 2, 4, 4)).double()
    noise = noise_of(x)
    drawn = iter(range(steps))
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, **__: noise(next(drawn)).double()
    )
    expected = []
    state = x
    for n in scheduler.timesteps.tolist():
        t = torch.full((3,), (n + 1) / 1000, dtype=torch.float64)
        state = scheduler.step(output(state, t), n, state).prev_sample
        expected.append(state)
    trajectory = list(dit_ddpm(Denoiser(denoise, PATH), x, steps, lambda step: noise(step).double()))
    assert len(trajectory) == steps == 1 + next(drawn)
    assert trajectory[-1][0] == 0.0
    for (_, actual), wanted in zip(trajectory, expected, strict=True):
        assert (actual - wanted).abs().max() < 1e-6 * wanted.abs().max().clamp(min=1)
    assert expected[-1].std() > 0.1


def test_three_channels_are_guided_and_the_variance_is_that_of_the_label():
    net, x = dit(), start((3, 4, 8, 8))
    t, y = torch.tensor([0.001, 0.5, 1.0]), torch.tensor([0, 1, 2])
    cond, uncond = net(x, t, y), net(x, t, torch.full_like(y, 3))
    official = torch.cat([uncond[:, :3] + 4.0 * (cond[:, :3] - uncond[:, :3]), cond[:, 3:]], dim=1)
    some, every = (ClassifierFree(4.0, channels).wrap(model(net), y, clip=False).fn(x, t) for channels in (3, None))
    assert torch.allclose(torch.cat(some[1:], dim=1), official, atol=1e-5)
    assert torch.allclose(every[1][:, 3], uncond[:, 3] + 4.0 * (cond[:, 3] - uncond[:, 3]), atol=1e-5)
    assert torch.allclose(every[2], cond[:, 4:], atol=1e-5)
    assert (cond[:, 4:] - uncond[:, 4:]).abs().max() > 0.1


@pytest.mark.parametrize("sampler", ["dit-ddpm", "ddpm", "dpm++", "ddim", "heun", "uvit-dpm", "euler-maruyama"])
def test_a_network_with_a_learned_variance_makes_images_with_every_kind_of_sampler(sampler):
    sampling = Sampling(sampler, 4, 2.0, guidance_channels=3)
    images = generate(model(dit()), sampling, range(3), [0, 1, 2], 0)
    again = generate(model(dit()), sampling, [1], [1], 0)
    assert images.shape == (3, 4, 8, 8)
    assert images.isfinite().all()
    assert torch.allclose(images[1:2], again, atol=1e-4 * images.abs().max().item())


def test_other_samplers_see_a_network_without_its_variance():
    sampling = Sampling("ddim", 3)
    plain = replace(model(dit(learned_variance=False)), learned_variance=False)
    with_it, without = (generate(of, sampling, [0], [0], 0) for of in (model(dit()), plain))
    assert torch.equal(with_it, without)


def test_what_it_cannot_sample_is_refused():
    with raises_user_error("dit-ddpm", 2):
        Sampling("dit-ddpm", 1)
    for path in (VP(), SDDiscrete()):
        with raises_user_error("dit-ddpm", "DDPMLinear", type(path).__name__):
            model(dit(), path).check(Sampling("dit-ddpm"))
    with raises_user_error("dit-ddpm", "learned variance"):
        model(dit(learned_variance=False)).check(Sampling("dit-ddpm"))
    model(dit()).check(Sampling("dit-ddpm", guidance=1.5, guidance_channels=3))
