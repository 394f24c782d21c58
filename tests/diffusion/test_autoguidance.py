"""Autoguidance: a worse network of the same images and labels guides, against a computation by hand."""

from dataclasses import replace

import pytest
import torch
from small_source import CLASSES, T, Y, images, network, noise, source

from uvit_decay.diffusion.denoiser import denoise_fn
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.diffusion.prediction import T_EPS, sampling_interval
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.terminal.errors import UserError


def both():
    """Return a network and its guide, which have other weights."""
    worse = network()
    with torch.no_grad():
        for parameter in worse.parameters():
            parameter.mul_(0.9)
    return source(network()), source(worse)


@pytest.mark.parametrize("clip", [False, True])
def test_it_is_the_formula(clip):
    good, bad = both()
    x = noise()
    d_good, d_bad = (
        denoise_fn(each.net, each.path, each.prediction, Y, clip=False)(x, torch.full_like(T, 0.5))[0]
        for each in (good, bad)
    )
    expected = d_bad + 2.5 * (d_good - d_bad)
    sampling = Sampling(guidance=2.5, clip=clip)
    actual, eps = replace(good, guide=bad).denoiser(sampling, Y.tolist()).denoise(x, 0.5)
    assert torch.allclose(actual, expected.clamp(-1, 1) if clip else expected, atol=1e-5)
    times = torch.full_like(T, 0.5)
    assert torch.allclose(eps, good.path.eps_from_x(x, actual, times), atol=1e-4)


def test_a_guide_of_another_prediction_keeps_it_and_its_interval():
    good, bad = (replace(each, path=Linear()) for each in both())
    good = replace(good, prediction="velocity")
    denoisers = [denoise_fn(each.net, each.path, each.prediction, Y, clip=False) for each in (good, bad)]
    times = torch.full_like(T, 0.5)
    d_good, d_bad = (denoise(noise(), times)[0] for denoise in denoisers)
    guided = replace(good, guide=bad).denoiser(Sampling(guidance=2.5, clip=False), Y.tolist())
    assert torch.allclose(guided.denoise(noise(), 0.5)[0], d_bad + 2.5 * (d_good - d_bad), atol=1e-5)
    alone = good.denoiser(Sampling(clip=False), Y.tolist())
    assert (alone.low, alone.high) == (0, 1)
    assert (guided.low, guided.high) == sampling_interval(Linear(), "eps", clip=False) == (T_EPS, 1 - T_EPS)


def test_outside_of_its_interval_the_network_is_alone():
    good, bad = both()
    sampling = Sampling(guidance=2.0, guidance_interval=(0.4, 0.6), clip=False)
    guided = replace(good, guide=bad).denoiser(sampling, Y.tolist())
    alone = good.denoiser(Sampling(clip=False), Y.tolist())
    assert torch.equal(guided.denoise(noise(), 0.8)[0], alone.denoise(noise(), 0.8)[0])
    assert not torch.equal(guided.denoise(noise(), 0.5)[0], alone.denoise(noise(), 0.5)[0])


def test_a_guide_of_itself_changes_nothing():
    good, _ = both()
    plain = images(Sampling("ddim", 3), [0, 1], [0, 1], of=good)
    same = images(Sampling("ddim", 3, 4.0), [0, 1], [0, 1], of=replace(good, guide=good))
    assert torch.allclose(plain, same, atol=1e-5)


def test_a_guide_that_does_not_fit_is_refused():
    good, bad = both()
    sampling = Sampling(guidance=2.0)
    others = [replace(bad, path=Linear()), replace(bad, shape=(3, 4, 4)), replace(bad, num_classes=CLASSES + 1)]
    for other, name in zip(others, ("path", "shape", "num_classes"), strict=True):
        with pytest.raises(UserError) as refusal:
            replace(good, guide=other).check(sampling)
        assert name in str(refusal.value)
    with pytest.raises(UserError):
        replace(good, guide=bad).check(Sampling(guidance=2.0, guidance_channels=1))


def test_at_scale_1_the_network_is_alone():
    good, bad = both()
    alone, guided = (each.denoiser(Sampling(), Y.tolist()) for each in (good, replace(good, guide=bad)))
    assert torch.equal(alone.denoise(noise(), 0.5)[0], guided.denoise(noise(), 0.5)[0])
