"""Noise share: closed forms of a linear network, no bias at two draws, and the noise that is the same for all runs."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from evaluations import evaluate
from refusals import find_line, raises_user_error
from runs import fit

from uvit_decay.callbacks import LinearProbes
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.nn import Layer
from uvit_decay.representations import measure_noise_share, noise_share
from uvit_decay.representations.noise import NOISE_SCORES, NoiseSums
from uvit_decay.representations.probe_options import Probing
from uvit_decay.runs import history
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.random import normal, subset

CPU = torch.device("cpu")
ALONE = {"protocol": "noise-share", "times": (0.1, 0.4)}


class LinearNet(torch.nn.Module):
    """A prefix token that shows the time, and four tokens that are a linear map of the image; the next layer adds 5."""

    layers = (Layer("map", "embeddings"), Layer("shift", "encoder"))
    num_prefix_tokens, dim, num_classes, null_label = 1, 12, 10, True

    def __init__(self):
        super().__init__()
        self.map = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))

    def forward_intermediates(self, x, t, y=None):
        tokens = (x.flatten(1) @ self.map.T).unflatten(1, (4, 12))
        state = torch.cat([t[:, None, None].expand(-1, 1, 12), tokens], dim=1)
        yield state
        yield state + 5


def shares_of(data, **options):
    """Return the scores of the linear network by name, each (levels, layers)."""
    probing = Probing(**ALONE | options)
    return measure_noise_share(LinearNet(), Linear(), data, probing, CPU, "float32", Processes()).scores


def defined_shares(states):
    """Return the definition in numpy, with one loop over the images."""
    n, k = states.shape[:2]
    states = states.double().flatten(2).numpy()
    means = states.mean(axis=1)
    within = sum(np.square(of - mean).sum() for of, mean in zip(states, means, strict=True))
    within /= n * (k - 1) * states.shape[2]
    between = np.square(means - means.mean(axis=0)).sum(axis=1).mean() / states.shape[2]
    between = max(between - (1 - 1 / n) * within / k, 0.0)
    return within / (within + between), within, between


def test_a_linear_network_has_its_closed_form(digits):
    """W = sigma^2 |A|^2 / D, B = alpha^2 mean |A (x_i - mean x)|^2 / D, and D counts the prefix token."""
    found = shares_of(digits, noise_draws=32, noise_images=64)
    x = digits.test.images[subset(digits.test, 64, "noise share")].flatten(1).double() / 127.5 - 1
    spread = ((x - x.mean(dim=0)) @ LinearNet().map.double().T).square().sum(dim=1).mean()
    for level, t in enumerate(ALONE["times"]):
        within = t**2 * float(LinearNet().map.double().square().sum()) / 60
        between = (1 - t) ** 2 * float(spread) / 60
        expected = dict(zip(NOISE_SCORES, (within / (within + between), within, between), strict=True))
        for name, value in expected.items():
            assert found[name][level].tolist() == pytest.approx([value, value], rel=0.02), name


def test_the_noise_is_that_of_seed_image_and_draw_at_every_level_and_batch_size(digits):
    options = {"noise_draws": 3, "noise_images": 20, "seed": 7}
    found = shares_of(digits, **options)
    chosen = torch.tensor(subset(digits.test, 20, "noise share"))
    x = digits.test.images[chosen].float() / 127.5 - 1
    for level, t in enumerate(ALONE["times"]):
        times = torch.full((20,), t)
        states = []
        for draw in range(3):
            noise = normal("probe", 7, "noise share", draw, rows=chosen, shape=(1, 8, 8))
            states.append(next(LinearNet().forward_intermediates(Linear().add_noise(x, noise, times), times)))
        expected = defined_shares(torch.stack(states, dim=1))
        for name, value in zip(NOISE_SCORES, expected, strict=True):
            assert found[name][level].tolist() == pytest.approx([value, value], rel=1e-5), name
    other = shares_of(digits, **options, batch_size=2, layers=("1",))  # less than the draws of an image
    alone = shares_of(digits, **options | {"times": (0.4,)})
    for name in NOISE_SCORES:
        torch.testing.assert_close(other[name], found[name][:, 1:], rtol=1e-5, atol=0)
        assert torch.equal(alone[name], found[name][1:])
    assert not torch.equal(shares_of(digits, **options | {"seed": 8})["noise_share"], found["noise_share"])


def test_both_variances_are_unbiased_for_two_draws():
    """Over 1000 draws of the noise, whose variance is 4, of the same images; the spread of plain means is too large."""
    g = torch.Generator().manual_seed(0)
    images = 3 * torch.randn(6, 1, 4, generator=g, dtype=torch.float64)
    measured = []
    for _ in range(1000):
        states = images + 2 * torch.randn(6, 2, 4, generator=g, dtype=torch.float64)
        _, within, between = noise_share(states)
        spread = states.mean(dim=1).var(dim=0, correction=0).mean()
        measured.append(torch.stack([within, between, spread]))
    measured = torch.stack(measured)
    means, errors = measured.mean(dim=0), measured.std(dim=0) / 1000**0.5
    true = float(images.var(dim=0, correction=0).mean())
    deviations = (means - torch.tensor([4.0, true, true])) / errors
    assert deviations[:2].abs().max() < 3
    assert deviations[2] > 10


def test_the_maximum_acts_on_b_alone():
    """Without it, B of images that differ by less than their noise could be negative."""
    states = torch.tensor([[[1.0], [-1.0]], [[1.0], [-1.0]]])
    assert torch.stack(noise_share(states)).tolist() == [1, 2, 0]


def test_batches_precision_and_a_large_mean_change_nothing():
    g = torch.Generator().manual_seed(0)
    states = torch.randn(9, 4, 3, 5, generator=g, dtype=torch.float64) + torch.randn(9, 1, 3, 5, generator=g)
    expected = defined_shares(states)
    assert torch.stack(noise_share(states)).tolist() == pytest.approx(expected, rel=1e-12)
    sums = NoiseSums()
    for part in (1e6 + states).split([1, 5, 3]):
        sums.add(part)
    assert torch.stack(sums.result()).tolist() == pytest.approx(expected, rel=1e-7)
    half = states.bfloat16()
    assert torch.stack(noise_share(half)).tolist() == pytest.approx(defined_shares(half), rel=1e-12)
    assert torch.stack(noise_share(torch.ones(3, 2, 4))).tolist() == [0, 0, 0]
    assert float(noise_share(states[:1]).share) == 1
    for damaged in (math.nan, math.inf):
        states[4, 2, 1, 0] = damaged
        assert noise_share(states).share.isnan()
    states = half.double()
    for wrong in (states[:, :1], states[:0]):
        with raises_user_error("noise draws", len(wrong)):
            noise_share(wrong)


def test_the_noise_share_alone_and_beside_probes_is_the_same(trained, tmp_path, monkeypatch, capsys):
    options = ["--ckpt", trained, "--times", "0.05,0.3", "--noise-draws", 2, "--noise-images", 30]
    small = ["--max-train", 60, "--max-test", 30]
    evaluate(monkeypatch, tmp_path, "probe", *options, "--protocol", "noise-share")
    name = "last-step12-ema-digits-times-0.05+0.3-protocol-noise-share-noise_draws-2-noise_images-30"
    (alone,) = (tmp_path / "probes").glob(f"{name}_*")
    beside = tmp_path / "beside"
    find_line(capsys.readouterr().out, "t = 0.3", "embeddings")
    evaluate(monkeypatch, tmp_path, "probe", *options, *small, "--out", beside)
    find_line(capsys.readouterr().out, "30 test images", "2 draws")
    noise = {"noise_share.csv", "noise_share.json", "noise_share.png"}
    probes = {"probes.csv", "probes.json", "probes.png"}
    assert {path.name for path in alone.iterdir()} == noise
    assert {path.name for path in beside.iterdir()} == noise | probes
    shutil.copytree(beside, tmp_path / "again")
    evaluate(monkeypatch, tmp_path, "probe", *options[:-4], *small, "--out", tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == probes
    one, two = (json.loads((folder / "noise_share.json").read_text()) for folder in (alone, beside))
    assert one == two
    assert (one["protocol"]["noise_share"]["images"], one["protocol"]["noise_share"]["draws"]) == (30, 2)
    assert all(0 < cell["noise_share"] < 1 for cell in one["cells"])
    evaluate(monkeypatch, tmp_path, "probe", *options, "--protocol", "noise-share", "--out", beside)
    assert {path.name for path in beside.iterdir()} == noise


def test_the_callback_records_and_draws_it(tmp_path):
    options = {"times": (0.1,), "layers": (0, 2), "noise_draws": 2, "noise_images": 20}
    fit(tmp_path, LinearProbes(**options, max_train=60, max_test=30), max_steps=2)
    (point,) = history.read(tmp_path / "probes.jsonl")
    assert (tmp_path / "noise_share.png").stat().st_size > 1000
    assert len((tmp_path / "noise_share.csv").read_text().splitlines()) == 1 + 2
    assert 0 < point.values["tracked_noise_share"] < 1
    assert (point.metadata["noise_share"]["images"], point.metadata["noise_share"]["draws"]) == (20, 2)
