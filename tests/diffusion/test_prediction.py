"""Networks of noise, data, velocity and score, one network in four languages, and the times at which each is used."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from sampler_cases import NAMES, PATHS, sound, unchecked  # noqa: F401  a fixture
from small_source import NET, PATH, T, Y, images, noise, source

from uvit_decay.diffusion.noise_path import GVP, VP, Linear, SDDiscrete
from uvit_decay.diffusion.prediction import (
    Prediction,
    Weighting,
    sampling_interval,
    training_interval,
    training_times,
    x_eps_from_output,
)
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.runtime.random import normal

SOFT = 0.02  # dopri5 only promises its rtol of 1e-3 a step, and rounding decides which steps it takes


@pytest.mark.parametrize("prediction", get_args(Prediction))
def test_the_denoiser_splits_its_input_into_data_in_range_and_the_noise_that_agrees(prediction):
    def net(x, t, y):
        return 5 * NET(x, t, y)

    x_t = 2 * noise()
    (free, free_eps), (x, eps) = (source(net, prediction).plain(Y, clip).fn(x_t, T) for clip in (False, True))
    assert free.abs().max() > 1.5
    assert torch.equal(x, free.clamp(-1, 1))
    assert torch.allclose(PATH.add_noise(x, eps, T), x_t, atol=1e-5)
    if prediction in ("eps", "x"):
        assert torch.equal({"x": free, "eps": free_eps}[prediction], net(x_t, T, Y))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dopri5"])
def test_clip_keeps_the_samples_of_a_wild_network_in_range(name):
    def wild(x, t, y):
        return 10 * NET(x, t, y)

    clipped, free = (images(Sampling(name, 10, clip=clip), of=source(wild)).abs().max() for clip in (True, False))
    if name in ("dpm++", "ddim", "ddpm"):  # their last step lands on a denoised image
        assert clipped <= 1 + 1e-5
    assert clipped < free / 3


def translated(path, native, target):
    """Return NET, which predicts `native`, as a network that predicts `target`."""

    def net(x_t, t, y):
        x, eps = x_eps_from_output(path, native, x_t, NET(x_t, t, y), t)
        return {"x": x, "eps": eps, "velocity": path.velocity(x, eps, t), "score": path.score(eps, t)}[target]

    return net


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("native", "path"), zip(["eps", "x", "eps", "x"], PATHS, strict=True))
@pytest.mark.parametrize("name", NAMES)
def test_all_predictions_make_the_same_images(name, native, path, clip):
    """From networks of data, noise, velocity and score that are one network, over times at which all have a value."""
    if not sound(name, path) or (name == "dopri5" and (native, path, clip) != ("x", GVP(), False)):
        return  # dopri5 takes its time
    count = 1 if name == "dopri5" else 2
    x, y = noise(count), Y[:count]

    def image(prediction):
        denoiser = source(translated(path, native, prediction), prediction, path=path).plain(y, clip)
        low, high = sampling_interval(path, "eps", clip)
        denoiser = replace(denoiser, low=low, high=high)
        steps = SAMPLERS[name].run(
            denoiser, x, 4, lambda i: normal("test", i, rows=torch.arange(count), shape=x.shape[1:])
        )
        return list(steps)[-1][1]

    expected = image(native)
    atol = SOFT if name == "dopri5" else 1e-4
    for prediction in set(get_args(Prediction)) - {native}:
        assert torch.allclose(image(prediction), expected, atol=atol * max(1, expected.abs().max().item())), prediction


@pytest.mark.parametrize("prediction", get_args(Prediction))
@pytest.mark.parametrize("path", PATHS)
def test_every_prediction_makes_images_with_every_sampler(prediction, path):
    """At the times that belong to it, of which none may be at an end where it has no value."""
    of = source(prediction=prediction, path=path)
    clip = prediction in ("x", "score")
    for name in NAMES:
        if sound(name, path):
            assert images(Sampling(name, 3, clip=clip), [0], [1], of=of).isfinite().all(), name


PREDICTIONS, WEIGHTINGS = get_args(Prediction), get_args(Weighting)
CASES = [(p, w) for p in PREDICTIONS for w in WEIGHTINGS if w == "none" or p in ("eps", "score")]
INTERVALS = [
    *(((path, "velocity", "none"), (0.0, 1.0)) for path in (Linear(), GVP())),
    *(((path, p, w), (1e-3, 1 - 1e-3)) for path in (Linear(), GVP()) for p, w in CASES if p in ("eps", "score")),
    *(((path, p, "none"), (0.0, 1.0)) for path in (VP(), SDDiscrete()) for p in ("eps", "x")),
    ((VP(), "velocity", "none"), (1e-5, 1.0)),
    *(((VP(), p, w), (1e-5, 1.0)) for p, w in CASES if w != "none"),
]


@pytest.mark.parametrize(("case", "interval"), INTERVALS)
def test_training_keeps_to_sits_interval(case, interval):
    assert training_interval(*case) == interval
    u = torch.tensor([0.0, 0.25, 1 - 2**-24])
    t = training_times(*case, u)
    assert t.min() >= interval[0] * (1 - 1e-6)
    assert t.max() <= interval[1]
    if interval == (0.0, 1.0):
        assert torch.equal(t, case[0].times(u)), "runs of U-ViT stay as they were, to the bit"


@pytest.mark.parametrize(
    ("path", "prediction", "clip", "interval"),
    [
        *((path, "velocity", False, (0.0, 1.0)) for path in (Linear(), GVP())),
        *((path, "velocity", True, (1e-3, 1.0)) for path in (Linear(), GVP())),
        *((path, p, False, (1e-3, 1 - 1e-3)) for path in (Linear(), GVP()) for p in ("eps", "score")),
        *((VP(), p, False, (1e-3, 1.0)) for p in ("eps", "x", "score", "velocity")),
    ],
)
def test_networks_are_evaluated_where_sit_evaluates_them(path, prediction, clip, interval):
    assert sampling_interval(path, prediction, clip) == interval
