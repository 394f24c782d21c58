"""Classifier-free guidance as a wrapper, and who may use it."""

from dataclasses import replace

import pytest
import torch
from refusals import raises_user_error
from small_source import CLASSES, NET, T, Y, counted, images, network, noise, source

from uvit_decay.diffusion.denoiser import Guided
from uvit_decay.diffusion.sampling import Sampling


def test_guidance_of_one_is_the_network_itself():
    net, calls = counted()
    assert torch.equal(Guided(net, 1.0, CLASSES)(noise(), T, Y), NET(noise(), T, Y))
    assert calls == [5]
    guided = Sampling(guidance=2.0)
    source().check(guided)
    assert source().unguided(guided) == guided


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.5, 4.0, 50.0])
def test_guidance_is_the_formula(scale):
    x = noise()
    cond, uncond = NET(x, T, Y), NET(x, T, torch.full_like(Y, CLASSES))
    expected = uncond + scale * (cond - uncond)
    guided = Guided(NET, scale, CLASSES)(x, T, Y)
    assert torch.allclose(guided, expected, atol=1e-5 * max(1, scale))
    assert (cond - uncond).abs().max() > 0.05
    assert torch.allclose(guided[3], uncond[3], atol=1e-5 * max(1, scale)), "the null label itself is not guided"


@pytest.mark.parametrize(
    ("num_classes", "null_label", "reason"), [(0, False, "class-conditional"), (CLASSES, False, "null label")]
)
def test_guidance_without_its_means_is_a_user_error(num_classes, null_label, reason):
    net = network(num_classes=num_classes, null_label=null_label)
    of = source(net, num_classes=num_classes, null_label=null_label)
    labels = [0] if num_classes else None
    guided = Sampling(steps=2, guidance=1.5)
    with raises_user_error("guidance", reason):
        of.check(guided)
    with raises_user_error("guidance", reason):
        images(guided, [0], labels, of=of)
    assert of.unguided(guided) == replace(guided, guidance=1.0)
    of.check(of.unguided(guided))
    assert images(of.unguided(guided), [0], labels, of=of).isfinite().all()


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


def test_half_precision_is_guided_in_that_of_the_image():
    def net(x, t, y):
        return NET(x, t, y).bfloat16()

    both = NET(torch.cat([noise(), noise()]), torch.cat([T, T]), torch.cat([Y, torch.full_like(Y, CLASSES)]))
    cond, uncond = both.bfloat16().float().chunk(2)
    actual = Guided(net, 4.0, CLASSES)(noise(), T, Y)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual, uncond + 4 * (cond - uncond), atol=1e-5)


def test_the_interval_and_the_channels_reach_the_images():
    net, calls = counted()
    sampling = Sampling("ddim", 4, 3.0, guidance_interval=(0.4, 0.8))  # of t = 1, .75, .5, .25
    images(sampling, [0, 1], [0, 1], of=source(net))
    assert calls == [2, 4, 4, 2]
    some = replace(sampling, guidance_channels=1, guidance_interval=None)
    assert not torch.allclose(images(some), images(replace(some, guidance_channels=None)), atol=1e-3)
    with raises_user_error("guidance_channels 3", 2):
        images(replace(some, guidance_channels=3))
