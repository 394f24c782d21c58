"""Every sampler against distributions whose denoiser, and whose probability flow, are known in closed form."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from sampler_cases import MEAN, NAMES, PATH, PATHS, SAME, SOUND, STD, gaussian, noise_of, run, start, unchecked  # noqa: F401  a fixture

from uvit_decay.diffusion.noise_path import GVP, VP, Linear, SDDiscrete, expand
from uvit_decay.diffusion.ode import T_MIN
from uvit_decay.diffusion.samplers import SAMPLERS

CENTRES = torch.tensor([[-0.6, 0.2], [0.5, -0.3]])
WEIGHTS = torch.tensor([0.3, 0.7])
SPREAD = 0.15
ENOUGH_STEPS = {"dpm++": 200, "ddim": 250, "ddpm": 500, "dopri5": 1, "euler": 200, "heun": 50}
ENOUGH_STEPS |= {
    "euler-maruyama": 300,
    "sit-ode": 50,
    "sit-sde": 250,
    "sit-sde-heun": 125,
    "uvit-dpm": 50,
    "uvit-dpm++": 200,
}
SHORT = {"sit-sde": (0.03, 0.06), "sit-sde-heun": (0.03, 0.06)}  # what the last step of 0.04 takes off the deviations
DETERMINISTIC = [name for name in NAMES if not SAMPLERS[name].stochastic]


def mixture(x_t, t):
    """E[x | x_t] where the two channels of each pixel are a point of a mixture of two Gaussians."""
    alpha, sigma = expand(PATH.alpha(t), x_t), expand(PATH.sigma(t), x_t)
    variance = alpha**2 * SPREAD**2 + sigma**2
    centres = CENTRES[:, None, :, None, None]
    offsets = x_t - alpha * centres
    log_weights = WEIGHTS.log()[:, None, None, None, None] - offsets.square().sum(2, keepdim=True) / (2 * variance)
    x = (log_weights.softmax(0) * (centres + alpha * SPREAD**2 / variance * offsets)).sum(0)
    return x, (x_t - alpha * x) / sigma


def marginal(t, path=PATH):
    """Mean and deviation of the noised Gaussian at t."""
    t = torch.tensor([t], dtype=torch.float64)
    return path.alpha(t) * MEAN, (path.alpha(t).square() * STD**2 + path.sigma(t).square()).sqrt()


def denoiser(x_1, t, path=PATH):
    """Where the probability flow of the Gaussian takes x_1: the same quantile of the marginal at t."""
    (first_mean, first_std), (mean, std) = marginal(1.0, path), marginal(t, path)
    return mean + std / first_std * (x_1 - first_mean)


def counted(denoise):
    """`denoise` and the list of times that it was called with."""
    times = []

    def call(x_t, t):
        assert t.shape == (len(x_t),)
        assert (t == t[0]).all()
        times.append(t[0].item())
        return denoise(x_t, t)

    return call, times


def error_at(name, steps, time, path):
    """Largest distance from the exact denoiser when the trajectory comes by `time`."""
    x = torch.linspace(-2, 2, 9).reshape(9, 1, 1, 1)
    trajectory = run(name, partial(gaussian, path=path), x, steps, path=path)
    at, state = min(trajectory, key=lambda item: abs(item[0] - time))
    assert at == pytest.approx(time, abs=1e-9)
    return (state - denoiser(x, time, path)).abs().max().item()


def test_every_sampler_has_its_case():
    assert set(ENOUGH_STEPS) == set(NAMES)


@pytest.mark.parametrize(("preset", "name"), SAME.items())
def test_a_preset_is_a_sampler_with_another_number_of_steps(preset, name):
    actual, expected = SAMPLERS[preset], SAMPLERS[name]
    assert actual.paper != expected.paper
    assert replace(actual, steps=expected.steps, paper=False) == expected


@pytest.mark.parametrize(("name", "path"), SOUND)
def test_a_gaussian_is_sampled_with_its_mean_and_deviation(name, path):
    mean, std = marginal(1.0, path)  # the noisiest level of SD's schedule still shows the data
    x = (mean + std * start((4, 1, 64, 64))).float()
    sample = run(name, partial(gaussian, path=path), x, ENOUGH_STEPS[name], path=path)[-1][1]
    # 16384 values: standard errors 0.004 and 0.003; the rest is the sampler's own error.
    assert sample.mean().item() == pytest.approx(MEAN, abs=0.015)
    assert sample.std().item() == pytest.approx(STD, abs=SHORT.get(name, (0.015,))[0])
    standard = (sample.double() - sample.mean()) / sample.std()
    assert standard.pow(3).mean().item() == pytest.approx(0, abs=0.08)
    assert standard.pow(4).mean().item() == pytest.approx(3, abs=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_a_mixture_is_sampled_with_its_weights_centres_and_spread(name):
    x = start((4, 2, 64, 64))
    sample = run(name, mixture, x, ENOUGH_STEPS[name])[-1][1]
    points = sample.movedim(1, -1).reshape(-1, 2)
    nearest = torch.cdist(points, CENTRES).argmin(dim=1)
    for k in range(2):
        own = points[nearest == k]
        assert len(own) / len(points) == pytest.approx(WEIGHTS[k].item(), abs=0.015)
        assert torch.allclose(own.mean(0), CENTRES[k], atol=0.015)
        assert torch.allclose(own.std(0), torch.tensor(SPREAD), atol=SHORT.get(name, (0, 0.015))[1])
        assert torch.corrcoef(own.T)[0, 1].abs() < (0.1 if name in SHORT else 0.06)


CLOSE = [("dpm++", 400, 0.01), ("ddim", 500, 0.02), ("heun", 100, 0.01), ("sit-ode", 100, 0.01), ("dopri5", 1, 0.03)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "steps", "atol"), CLOSE)
def test_a_deterministic_sampler_follows_the_exact_flow(name, steps, atol, path):
    x = start((2, 1, 8, 8))
    actual = run(name, partial(gaussian, path=path), x, steps, path=path)[-1][1]
    assert torch.allclose(actual, denoiser(x, 0.0, path).float(), atol=atol)


@pytest.mark.parametrize(
    ("path", "name", "order", "time", "steps"),
    [
        # Their grids meet at one time before the end, whose last step is of first order for all of them.
        (VP(), "euler", 1, T_MIN, (51, 101, 201)),
        (VP(), "heun", 2, T_MIN, (26, 51, 101)),
        (VP(), "ddim", 1, 0.5, (50, 100, 200)),
        (VP(), "dpm++", 2, 0.5, (10, 20, 40)),
        # Not Heun: its order needs a smooth drift, and SD's jumps at each level.
        (SDDiscrete(), "euler", 1, T_MIN, (51, 101, 201)),
        (SDDiscrete(), "ddim", 1, 0.5, (50, 100, 200)),
        (SDDiscrete(), "dpm++", 2, 0.5, (10, 20, 40)),
        (Linear(), "euler", 1, T_MIN, (51, 101, 201)),
        (GVP(), "heun", 2, T_MIN, (26, 51, 101)),
        (Linear(), "sit-ode", 2, 0.5005, (10, 20, 40)),
        (Linear(), "dpm++", 2, 0.5, (20, 40, 80)),
        (GVP(), "dpm++", 2, 0.5, (20, 40, 80)),
    ],
)
def test_more_steps_help_as_much_as_the_order_says(path, name, order, time, steps):
    errors = [error_at(name, count, time, path) for count in steps]
    for (many, less), (few, more) in itertools.pairwise(zip(steps, errors, strict=True)):
        assert math.log(less / more) / math.log(few / many) == pytest.approx(order, abs=0.35), errors


def test_the_singlestep_solver_is_of_third_order():
    x = torch.linspace(-2, 2, 9, dtype=torch.float64).reshape(9, 1, 1, 1)
    samples = [run("uvit-dpm", gaussian, x, steps)[-1][1] for steps in (23, 47, 95)]
    errors = [(sample - denoiser(x, 1e-4)).abs().max().item() for sample in samples]
    for more, less in itertools.pairwise(errors):
        assert math.log2(more / less) == pytest.approx(3, abs=0.5), errors


@pytest.mark.parametrize("steps", [1, 2, 3, 25, 61, 300])
@pytest.mark.parametrize("name", NAMES)
def test_the_network_is_called_as_often_as_promised(name, steps):
    denoise, times = counted(gaussian)
    run(name, denoise, start((2, 1, 4, 4)), steps)
    promised = SAMPLERS[name].nfe(steps)
    assert len(times) == promised if promised else 20 < len(times) < 200
    assert times[0] == 1.0
    assert min(times) >= (1e-4 if name == "uvit-dpm" else 0.999 * T_MIN)
    assert max(times) <= 1


@pytest.mark.parametrize("steps", [1, 2, 3, 25, 61, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_a_trajectory_has_one_state_a_step_and_ends_at_zero(name, steps):
    x = start((2, 1, 4, 4))
    trajectory = run(name, gaussian, x, steps)
    times = [t for t, _ in trajectory]
    assert len(times) == steps
    assert all(0 <= after < before for before, after in itertools.pairwise([1.0, *times]))
    assert times[-1] == 0.0
    for _, state in trajectory:
        assert state.shape == x.shape
        assert state.dtype == x.dtype
        assert state.isfinite().all()


@pytest.mark.parametrize(("name", "path"), SOUND)
def test_each_state_has_the_noise_of_its_time(name, path):
    x = start((4, 1, 32, 32))
    for t, state in run(name, partial(gaussian, path=path), x, 100, path=path)[4::10]:
        mean, std = marginal(t, path)
        assert state.mean().item() == pytest.approx(mean.item(), abs=0.06), t
        assert state.std().item() == pytest.approx(std.item(), abs=0.06), t


@pytest.mark.parametrize("name", NAMES)
def test_the_input_is_left_as_it_is(name):
    x = start((2, 1, 4, 4))
    before = x.clone()
    run(name, gaussian, x, 5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_does_not_depend_on_its_batch(name):
    x = start((6, 1, 4, 4))
    whole = run(name, gaussian, x, 10)[-1][1]
    for chosen in ([2], [0, 1, 2], [5, 2, 4]):
        part = run(name, gaussian, x[chosen], 10, noise_of(x[chosen], rows=chosen))[-1][1]
        assert torch.allclose(part, whole[chosen], atol=1e-6), chosen


@pytest.mark.parametrize("name", NAMES)
def test_only_stochastic_samplers_draw_noise(name):
    x = start((2, 1, 4, 4))
    one, again, other = (run(name, gaussian, x, 10, noise_of(x, key))[-1][1] for key in ("a", "a", "b"))
    assert torch.equal(one, again)
    assert torch.equal(one, other) != SAMPLERS[name].stochastic
    assert (name in DETERMINISTIC) != SAMPLERS[name].stochastic


@pytest.mark.parametrize("name", NAMES)
def test_the_global_stream_is_left_alone(name):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    run(name, gaussian, start((2, 1, 4, 4)), 5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", [name for name in NAMES if SAMPLERS[name].stochastic])
def test_noise_is_added_at_every_step_but_the_last(name):
    x, steps, drawn = start((2, 1, 4, 4)), 5, []

    def final(changed):
        """The sample, with other noise in step `changed`."""

        def noise(step):
            drawn.append(step)
            return noise_of(x, "other" if step == changed else "test")(step)

        return run(name, gaussian, x, steps, noise)[-1][1]

    samples = [final(changed) for changed in range(steps)]
    assert drawn == [0, 1, 2, 3] * steps
    for one, other in itertools.combinations(samples, 2):
        assert not torch.allclose(one, other, atol=1e-3)
