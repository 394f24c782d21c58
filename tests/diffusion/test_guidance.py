"""Guidance by the null label and by a worse network, against formulas; the interval of times; who may use which."""

from dataclasses import replace

import pytest
import torch
from refusals import raises_user_error
from small_source import CLASSES, NET, T, Y, counted, images, network, noise, source

from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.diffusion.prediction import T_EPS, sampling_interval
from uvit_decay.diffusion.sampling import ClassifierFree, Sampling


def guided(scale, net=NET):
    """Return the output of a network of data, guided by the null label."""
    return ClassifierFree(scale).wrap(source(net, "x"), Y, clip=False).fn(noise(), T)[0]


@pytest.fixture
def both():
    """Return a network and its guide, which have other weights."""
    worse = network()
    with torch.no_grad():
        for parameter in worse.parameters():
            parameter.mul_(0.9)
    return source(network()), source(worse)


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.5, 4.0, 50.0])
def test_guidance_is_the_formula(scale):
    x = noise()
    cond, uncond = NET(x, T, Y), NET(x, T, torch.full_like(Y, CLASSES))
    expected = uncond + scale * (cond - uncond)
    actual = guided(scale)
    assert torch.allclose(actual, expected, atol=1e-5 * max(1, scale))
    assert (cond - uncond).abs().max() > 0.05
    assert torch.allclose(actual[3], uncond[3], atol=1e-5 * max(1, scale)), "the null label itself is not guided"


def test_half_precision_is_guided_in_that_of_the_image():
    def net(x, t, y):
        return NET(x, t, y).bfloat16()

    both = NET(torch.cat([noise(), noise()]), torch.cat([T, T]), torch.cat([Y, torch.full_like(Y, CLASSES)]))
    cond, uncond = both.bfloat16().float().chunk(2)
    actual = guided(4.0, net)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual, uncond + 4 * (cond - uncond), atol=1e-5)


@pytest.mark.parametrize(("num_classes", "null_label"), [(0, False), (CLASSES, False)])
def test_guidance_without_its_means_is_a_user_error(num_classes, null_label):
    net = network(num_classes=num_classes, null_label=null_label)
    of = source(net, num_classes=num_classes, null_label=null_label)
    labels = [0] if num_classes else None
    sampling = Sampling(steps=2, guidance=1.5)
    with raises_user_error("guidance", "class-conditional", "null label"):
        images(sampling, [0], labels, of=of)
    assert of.unguided(sampling) == replace(sampling, guidance=1.0)
    assert images(of.unguided(sampling), [0], labels, of=of).isfinite().all()
    assert source().unguided(sampling) == sampling


def test_guidance_keeps_to_its_interval_and_asks_for_nothing_more():
    net, calls = counted()
    sampling = Sampling(guidance=3.0, guidance_interval=(0.1, 0.8), clip=False)
    inside, everywhere, nowhere = (
        source(net).denoiser(replace(sampling, **changes), Y.tolist())
        for changes in ({}, {"guidance_interval": None}, {"guidance": 1.0})
    )
    for time in (1.0, 0.9, 0.8, 0.3, 0.1, 0.05):
        calls.clear()
        actual = inside.denoise(noise(), time)[0]
        assert calls == [10 if 0.1 <= time <= 0.8 else 5]
        assert torch.equal(actual, (everywhere if 0.1 <= time <= 0.8 else nowhere).denoise(noise(), time)[0])
    calls.clear()
    images(Sampling("ddim", 4, 3.0, guidance_interval=(0.4, 0.8)), [0, 1], [0, 1], of=source(net))
    assert calls == [2, 4, 4, 2]  # at t = 1, .75, .5, .25


def test_the_channels_reach_the_images():
    some = Sampling("ddim", 4, 3.0, guidance_channels=1)
    assert not torch.allclose(images(some), images(replace(some, guidance_channels=None)), atol=1e-3)
    with raises_user_error("guidance_channels 3", 2):
        images(replace(some, guidance_channels=3))


@pytest.mark.parametrize("clip", [False, True])
def test_autoguidance_is_the_formula(both, clip):
    good, bad = both
    x = noise()
    d_good, d_bad = (each.plain(Y, clip=False).denoise(x, 0.5)[0] for each in both)
    expected = d_bad + 2.5 * (d_good - d_bad)
    sampling = Sampling(guidance=2.5, clip=clip)
    actual, eps = replace(good, guide=bad).denoiser(sampling, Y.tolist()).denoise(x, 0.5)
    assert torch.allclose(actual, expected.clamp(-1, 1) if clip else expected, atol=1e-5)
    times = torch.full_like(T, 0.5)
    assert torch.allclose(eps, good.path.eps_from_x(x, actual, times), atol=1e-4)


def test_a_guide_of_another_prediction_keeps_it_and_its_times(both):
    good, bad = (replace(each, path=Linear()) for each in both)
    good = replace(good, prediction="velocity")
    d_good, d_bad = (each.plain(Y, clip=False).denoise(noise(), 0.5)[0] for each in (good, bad))
    denoiser = replace(good, guide=bad).denoiser(Sampling(guidance=2.5, clip=False), Y.tolist())
    assert torch.allclose(denoiser.denoise(noise(), 0.5)[0], d_bad + 2.5 * (d_good - d_bad), atol=1e-5)
    alone = good.plain(Y, clip=False)
    assert (alone.low, alone.high) == (0, 1)
    assert (denoiser.low, denoiser.high) == sampling_interval(Linear(), "eps", clip=False) == (T_EPS, 1 - T_EPS)


def test_outside_of_its_interval_and_at_scale_1_the_network_is_alone(both):
    good, bad = both
    sampling = Sampling(guidance=2.0, guidance_interval=(0.4, 0.6))
    alone, one = (of.denoiser(Sampling(), Y.tolist()) for of in (good, replace(good, guide=bad)))
    some = replace(good, guide=bad).denoiser(sampling, Y.tolist())
    assert torch.equal(some.denoise(noise(), 0.8)[0], alone.denoise(noise(), 0.8)[0])
    assert not torch.equal(some.denoise(noise(), 0.5)[0], alone.denoise(noise(), 0.5)[0])
    assert torch.equal(one.denoise(noise(), 0.5)[0], alone.denoise(noise(), 0.5)[0])


@pytest.mark.parametrize("change", [{"path": Linear()}, {"shape": (3, 4, 4)}, {"num_classes": CLASSES + 1}])
def test_a_guide_that_does_not_fit_is_refused(change):
    with raises_user_error("guide", *change):
        replace(source(), guide=replace(source(), **change)).check(Sampling(guidance=2.0))


def test_channels_with_a_guide_which_has_none_are_refused():
    with raises_user_error("guidance_channels", "guide"):
        replace(source(), guide=source()).check(Sampling(guidance=2.0, guidance_channels=1))
