"""Times and the loss, against hand computations."""

import math
from typing import get_args

import jaxtyping
import pytest
import torch
from refusals import raises_user_error
from torch import nn

from uvit_decay.diffusion.noise_path import GVP, VP, Linear, SDDiscrete
from uvit_decay.diffusion.prediction import (
    Prediction,
    TrainingTimes,
    Weighting,
    check_loss,
    diffusion_loss,
    stratify_times,
    training_times,
)
from uvit_decay.runtime.random import uniform

PATH = VP()
PATHS = [VP(), SDDiscrete(), Linear(), GVP()]
PREDICTIONS, WEIGHTINGS = get_args(Prediction), get_args(Weighting)
CASES = [
    (p, w)
    for p in PREDICTIONS
    for w in WEIGHTINGS
    if w == "none" or p in ("eps", "score") or (p, w) == ("x", "velocity")
]


def draws(count, first=0):
    return uniform("times", 3, rows=torch.arange(first, first + count))


@pytest.mark.parametrize("total", [1, 7, 30, 96, 1024])
def test_times_hit_every_stratum_once_and_a_draw_is_the_place_in_it(total):
    t = stratify_times(draws(total), 0, total)
    assert t.dtype == torch.float32
    assert (t * total).floor().tolist() == list(range(total))
    assert t.min() >= 0
    assert t.max() < 1
    first = torch.arange(total).double()
    for u in (0.0, 0.5, 1 - 2**-12):
        t = stratify_times(torch.full((total,), u), 0, total).double()
        assert torch.allclose(t, (first + u) / total, atol=1e-7)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("total", [7, 30, 96])
def test_times_do_not_depend_on_sharding(total, ranks):
    whole = stratify_times(draws(total), 0, total)
    edges = [total * rank // ranks for rank in range(ranks + 1)]
    parts = [stratify_times(draws(b - a, a), a, total) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    assert torch.equal(torch.cat(parts), whole)


class Toy(nn.Module):
    """A convolution that also sees t and y; without jaxtyping's checks, which cannot be compiled."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x, t, y):
        return self.conv(x) + t[:, None, None, None] + (0 if y is None else y[:, None, None, None])


def batch(n=4):
    g = torch.Generator().manual_seed(1)
    x, eps = (torch.randn(n, 2, 6, 6, generator=g) for _ in range(2))
    return x, torch.arange(n) % 3, stratify_times(torch.rand(n, generator=g), 0, n), eps


def hand_weights(tau):
    """Return (alpha_t, sigma_t, w_t) in SiT's time tau = 1 - t, from the table of its paper."""
    half = math.pi * tau / 2
    linear = (tau, 1 - tau, (1 - tau) ** 2 / tau + (1 - tau))
    gvp_rate = math.pi / (2 * math.tan(half))
    gvp = (
        math.sin(half),
        math.cos(half),
        gvp_rate * math.cos(half) ** 2 + math.pi / 2 * math.sin(half) * math.cos(half),
    )
    abar = math.exp(-(0.1 * (1 - tau) + 9.95 * (1 - tau) ** 2))
    vp = (abar**0.5, (1 - abar) ** 0.5, (0.1 + 19.9 * (1 - tau)) / 2)
    return {Linear(): linear, GVP(): gvp, VP(): vp}


@pytest.mark.parametrize("path", [VP(), Linear(), GVP()])
@pytest.mark.parametrize(("prediction", "weighting"), CASES)
def test_targets_and_weights_are_those_of_sit(prediction, weighting, path):
    (x, y, _, eps), t, net = batch(), torch.tensor([0.1, 0.35, 0.6, 0.9]), Toy()
    loss = diffusion_loss(net, path, prediction, x, y, t, eps, weighting)
    assert loss.shape == (4,)
    assert loss.dtype == torch.float32
    for i, tau in enumerate((1 - t.double()).tolist()):
        alpha, sigma, w = hand_weights(tau)[path]
        out = net((alpha * x[i] + sigma * eps[i])[None], t[i : i + 1], y[i : i + 1])[0]
        score = out * sigma + eps[i]
        error = {"eps": out - eps[i], "x": out - x[i], "score": score}.get(prediction)
        if error is None:
            error = out - path.velocity(x[i : i + 1], eps[i : i + 1], t[i : i + 1])[0]
        weight = {"none": 1, "velocity": (w / sigma) ** 2, "likelihood": w / sigma**2}[weighting]
        if (prediction, weighting) == ("x", "velocity"):
            weight *= (alpha / sigma) ** 2  # an error of x as one of eps
        assert loss[i].item() == pytest.approx(weight * error.square().mean().item(), rel=2e-4)


def test_x_with_the_velocity_weight_on_the_linear_path_is_the_loss_of_jit():
    (x, _, _, eps), t = batch(), torch.tensor([0.0, 0.02, 0.05, 0.8])
    loss = diffusion_loss(lambda *_: x + 0.5, Linear(), "x", x, None, t, eps, "velocity")
    assert loss.tolist() == pytest.approx([0.25 / max(u, 0.05) ** 2 for u in t.tolist()], rel=1e-5)


@pytest.mark.parametrize(("mean", "std", "shift"), [(0.0, 1.0, 1.0), (0.8, 0.8, 1.0), (0.0, 1.0, 3.0)])
def test_logit_normal_times_have_its_quantiles_shifted(mean, std, shift):
    times = TrainingTimes("logit-normal", mean, std, shift)
    quantiles = {0.0: -math.inf, 0.02275013: -2.0, 0.1586553: -1.0, 0.5: 0.0, 0.8413447: 1.0}
    actual = training_times(Linear(), "velocity", "none", torch.tensor([*quantiles]), times)
    for t, normal in zip(actual.tolist(), quantiles.values(), strict=True):
        s = 1 / (1 + math.exp(-(mean + std * normal))) if normal > -math.inf else 0.0
        assert t == pytest.approx(shift * s / (1 + (shift - 1) * s), abs=1e-6)


def test_uniform_times_are_untouched():
    assert TrainingTimes().of(u := draws(10)) is u


@pytest.mark.parametrize(
    ("prediction", "weighting", "fragments"),
    [
        ("velocity", "likelihood", ("'likelihood'", "eps", "score", "velocity")),
        ("x", "likelihood", ("'likelihood'", "eps", "score", "x")),
        ("velocity", "velocity", ("'velocity'", "eps", "score", "x")),
        ("v_prediction", "none", ("prediction", "'v_prediction'")),
        ("eps", "foo", ("weighting", "'foo'")),
    ],
)
def test_a_loss_that_is_none_is_a_user_error(prediction, weighting, fragments, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks of types would come first
    with raises_user_error(fragments):
        check_loss(prediction, weighting)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("prediction", "weighting"), CASES)
def test_the_loss_is_finite_at_both_ends_of_its_interval(prediction, weighting, path):
    (x, _, _, eps) = batch()
    t = training_times(path, prediction, weighting, torch.tensor([0.0, 1e-7, 0.9, 1 - 2**-24]))
    assert diffusion_loss(lambda x, *_: 0.9 * x, path, prediction, x, None, t, eps, weighting).isfinite().all()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_loss_is_float32_under_bfloat16_autocast(prediction):
    net, (x, y, t, eps) = Toy(), batch()
    seen = []

    def watched(x_t, t, y):
        out = net(x_t, t, y)
        seen.append((x_t.dtype, net.conv(x_t).dtype))
        return out.bfloat16()

    exact = diffusion_loss(net, PATH, prediction, x, y, t, eps)
    with torch.autocast("cpu", torch.bfloat16):
        loss = diffusion_loss(watched, PATH, prediction, x, y, t, eps)
    assert seen == [(torch.float32, torch.bfloat16)], "autocast was on, and x_t was not rounded"
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, exact, rtol=0.02)
    assert not torch.equal(loss, loss.bfloat16().float())


@pytest.mark.parametrize(
    "form", [lambda x: x[:, :1], lambda x: torch.cat([x, x], 1), lambda x: x[:1], lambda x: x[..., :1]]
)
def test_an_output_of_another_shape_does_not_train(form):
    x, y, t, eps = batch()
    with raises_user_error((4, 2, 6, 6), tuple(form(x).shape)):
        diffusion_loss(lambda x, t, y: form(x), Linear(), "velocity", x, y, t, eps)
