"""The protocols by which papers sample: what each does with which network, and what it is called when it is changed."""

from dataclasses import replace

import pytest
import torch
from refusals import raises_user_error

from uvit_decay.diffusion.noise_path import GVP, VP, DDPMLinear, Linear, SDDiscrete
from uvit_decay.diffusion.protocols import SAMPLING_PROTOCOLS, mark_protocol, protocol_sampling
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling


def model(path, shape=(4, 32, 32), num_classes=1000, null_label=True, **options):
    net = torch.nn.Identity()  # no network is run
    device = torch.device("cpu")
    return DiffusionModel(net, path, "eps", shape, num_classes, null_label, device, shape[0] != 4, **options)


DIT = model(DDPMLinear(), learned_variance=True)
SIT, GREY = model(Linear()), model(Linear(), (1, 8, 8), 10)
LARGE, HUGE, CIFAR = model(VP()), model(SDDiscrete(), (4, 64, 64)), model(VP(), (3, 32, 32), 0)


@pytest.mark.parametrize(
    ("name", "of", "expected"),
    [
        ("sit", SIT, "sit-sde250_w1.5_first3"),
        ("sit", model(GVP()), "sit-sde250_w1.5_first3"),
        ("sit", model(Linear(), null_label=False), "sit-sde250_w1"),
        ("sit", GREY, "sit-sde250_w1.5"),
        ("dit", DIT, "dit-ddpm250_w1.5_first3"),
        ("uvit", LARGE, "uvit-dpm50_w1.4"),
        ("uvit", HUGE, "uvit-dpm++50_w1.7"),
        ("uvit", CIFAR, "uvit-em1000_w1"),
        ("uvit", model(VP(), (3, 64, 64), 1000, False), "uvit-dpm50_w1"),
    ],
)
def test_a_network_is_sampled_as_its_paper_does(name, of, expected):
    sampling = protocol_sampling(name, of)
    assert sampling.name == expected
    assert sampling.method.paper
    assert not of.clips(sampling)
    of.check(sampling)
    plain = protocol_sampling(name, of, 1.0)
    assert plain.name.endswith("_w1")
    assert mark_protocol(name, of, plain) == mark_protocol(name, of, sampling) == name


@pytest.mark.parametrize(
    ("name", "of", "message"),
    [("sit", LARGE, ("protocol sit", "Linear", "GVP", "VP")), ("ours", SIT, ("ours", *SAMPLING_PROTOCOLS))],
)
def test_a_protocol_for_other_networks_and_one_in_no_table_are_refused(name, of, message):
    with raises_user_error(message):
        protocol_sampling(name, of)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(guidance=2.0), "sit"),
        (dict(precision="bf16"), "sit"),
        (dict(steps=None), "sit"),
        (dict(steps=50), "sit-other-steps"),
        (dict(clip=True), "sit-other-clip"),
        (dict(guidance_channels=None), "sit-other-guidance-channels"),
        (dict(guidance_interval=(0.1, 0.6), steps=10), "sit-other-steps-guidance-interval"),
        (dict(guidance_interval=(0.1, 0.6), guidance=1.0), "sit"),
        (dict(sampler="sit-ode", steps=None), "sit-other-sampler-steps"),
        (dict(sampler="ddim", steps=250, clip=None), "sit-other-sampler"),
    ],
)
def test_what_is_changed_is_in_the_name(changes, expected):
    assert mark_protocol("sit", SIT, replace(Sampling("sit-sde", 250, 1.5, False, 3), **changes)) == expected
