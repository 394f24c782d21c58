"""Bits per dimension of image files and data sets under a checkpoint."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny_net
from evaluations import evaluate
from torch import nn

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.checkpoint import Checkpoint
from uvit_decay.checkpoint.card import ModelCard
from uvit_decay.data.batches import InMemory
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.evaluation.image_sources import ArrayImages, DatasetImages
from uvit_decay.evaluation.likelihood import check_likelihood, measure_likelihood
from uvit_decay.evaluation.options import LikelihoodOptions
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.instantiate import Spec

CPU = torch.device("cpu")
NAMES = tuple(map(str, range(10)))


class Gaussian(nn.Module):
    """The exact velocity where each pixel is N(0, STD^2), and what a network says of itself."""

    channels, image_size, num_classes, null_label, std = 1, 8, 0, False, 0.5

    def forward(self, x, t, y):
        t = t[:, None, None, None]
        return -(t - (1 - t) * self.std**2) / ((1 - t) ** 2 * self.std**2 + t**2) * x


def checkpoint_of(net, names=()):
    card = ModelCard(net=Spec.of(type(net), {}), class_names=names, data="digits", step=7)
    return Checkpoint(net.eval(), Linear(), "velocity", Sampling(), names, "digits", 7, "ema", None, card)


def images(n=40, size=8, names=NAMES):
    levels = torch.randint(0, 256, (n, 1, size, size), generator=torch.Generator().manual_seed(0))
    return DatasetImages("noise", InMemory(levels.byte(), torch.arange(n) % 10), 1, names)


def measured(checkpoint, source, **options):
    return measure_likelihood(checkpoint, source, LikelihoodOptions(**{"steps": 50, **options}), CPU, Processes())


@pytest.mark.parametrize("solver", ["heun", "dopri5"])
def test_bits_per_dim_are_those_of_the_density(solver):
    source = images()
    report = measured(checkpoint_of(Gaussian()), source, solver=solver)
    x = source.images.images.double() / 127.5 - 1
    # The mean over a level of x^2 is x^2 + width^2 / 12.
    power = (x.square() + (2 / 255) ** 2 / 12) / Gaussian.std**2
    nats = 0.5 * power + math.log(Gaussian.std) + 0.5 * math.log(2 * math.pi)
    wanted = nats.flatten(1).mean(1) / math.log(2) - math.log2(2 / 255)
    assert (report.bits - wanted).abs().max() < 0.01
    assert report.mean == pytest.approx(wanted.mean().item(), abs=3e-3)
    assert report.standard_error == pytest.approx(wanted.std().item() / math.sqrt(40), rel=0.1)


def test_numbers_do_not_depend_on_the_batch_size_and_the_protocol_is_written(tmp_path):
    checkpoint, source = checkpoint_of(tiny_net(zero_init=False, time_scale=100.0), NAMES), images(6)
    whole, parts = (measured(checkpoint, source, steps=4, batch_size=size) for size in (6, 4))
    assert torch.allclose(whole.bits, parts.bits, atol=1e-5)
    for changes in (dict(labels="null"), dict(seed=1), dict(steps=5)):
        assert not torch.equal(measured(checkpoint, source, **{"steps": 4} | changes).bits, whole.bits), changes
    whole.save(tmp_path / "bits.json")
    written = json.loads((tmp_path / "bits.json").read_text())
    assert (written["bits_per_dim"], written["standard_error"]) == (whole.mean, whole.standard_error)
    wanted = {"step": 7, "weights": "ema", "num": 6, "solver": "heun", "steps": 4, "labels": "own", "seed": 0}
    assert wanted.items() <= written["protocol"].items()
    assert written["protocol"]["images"]["name"] == "noise"
    assert written["protocol"]["precision"] == "float32"


def test_at_most_so_many_images_are_measured():
    assert len(measured(checkpoint_of(Gaussian()), images(), num=5).bits) == 5


def test_labels_of_an_array_are_class_numbers(tmp_path):
    levels = np.zeros((4, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "four.npz", arr_0=levels, arr_1=np.arange(4))
    names = tuple("abcdefghij")
    check_likelihood(checkpoint_of(tiny_net(), names), ArrayImages(tmp_path / "four.npz", 1), LikelihoodOptions())


LATENTS = LatentSpace("vae", "", 1.0, 0.0, 1, 8)


@pytest.mark.parametrize(
    ("checkpoint", "source", "options", "reason"),
    [
        (replace(checkpoint_of(Gaussian()), latents=LATENTS), images(), {}, "bits per dimension are of pixels"),
        (checkpoint_of(Gaussian()), images(size=16), {}, "noise has images of 16x16x1, this checkpoint makes 8x8x1"),
        (checkpoint_of(Gaussian()), images(1), {}, "noise has one image"),
        (checkpoint_of(tiny_net(), tuple("abcdefghij")), images(names=tuple("bcdefghija")), {}, "does not have the cl"),
        (checkpoint_of(tiny_net(), NAMES), images(names=()), {}, "choose --labels null"),
        (checkpoint_of(tiny_net(null_label=False), NAMES), images(), {"labels": "null"}, "trained with a null label"),
    ],
)
def test_what_has_no_likelihood_is_a_user_error(checkpoint, source, options, reason):
    with pytest.raises(UserError, match=reason):
        measured(checkpoint, source, **options)


@pytest.mark.parametrize("options", [dict(steps=0), dict(num=1), dict(batch_size=0), dict(seed=-1)])
def test_options_out_of_range_are_a_user_error(options):
    with pytest.raises(UserError, match=f"^--{next(iter(options)).replace(chr(95), chr(45))} must be at least"):
        LikelihoodOptions(**options)


def test_the_command_writes_mean_and_protocol(trained, tmp_path, monkeypatch, capsys):
    options = ["--images", "digits:test", "--num", "6", "--steps", "2", "--out", "bits.json"]
    evaluate(monkeypatch, tmp_path, "likelihood", "--ckpt", trained, *options)
    report = json.loads((tmp_path / "bits.json").read_text())
    assert f"{report['bits_per_dim']:.4f} +- {report['standard_error']:.4f} bits" in capsys.readouterr().out
    assert {"solver": "heun", "steps": 2, "num": 6, "step": 12}.items() <= report["protocol"].items()
