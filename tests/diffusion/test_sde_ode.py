"""SiT's samplers: grids, diffusion forms and last steps, in the numbers of its code and in closed forms."""

import math
from typing import get_args

import pytest
import torch
from refusals import raises_user_error
from sampler_cases import MEAN, STD, gaussian, noise_of, start, unchecked  # noqa: F401  a fixture

from uvit_decay.diffusion.denoiser import Denoiser
from uvit_decay.diffusion.noise_path import GVP, VP, Linear, expand
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sde import FORMS, SDE, Form

PATHS = [VP(), Linear(), GVP()]
FINITE = [(path, form, False) for path in PATHS for form in FORMS if form != "sbdm" or path == VP()]
FINITE += [(path, "sigma", True) for path in PATHS]


def denoiser(path, low=1e-3, high=1.0, times=None):
    """Return a denoiser of pixels from N(MEAN, STD^2); `times` collects the times of its calls."""

    def denoise(x_t, t):
        if times is not None:
            times.append(t[0].item())
        return gaussian(x_t, t, path)

    return Denoiser(denoise, path, low, high)


def run(sde, of, x, steps):
    return list(sde.run(of, x, steps, noise_of(x)))


def test_forms_are_those_of_sit():
    t = torch.tensor([0.2, 0.7], dtype=torch.float64)
    for i, tau in enumerate((1 - t).tolist()):
        w_t = (1 - tau) ** 2 / tau + (1 - tau)
        expected = {
            "constant": 1.5,
            "sbdm": 1.5 * w_t,
            "sigma": 1.5 * (1 - tau),
            "linear": 1.5 * (1 - tau),
            "decreasing": 0.25 * (1.5 * math.cos(math.pi * tau) + 1) ** 2,
            "increasing-decreasing": 1.5 * math.sin(math.pi * tau) ** 2,
        }
        actual = {name: form(Linear(), t, 1.5)[i].item() for name, form in FORMS.items()}
        assert actual == pytest.approx(expected)
    assert FORMS["sigma"](GVP(), t, 2.0)[0].item() == pytest.approx(2 * math.sin(0.1 * math.pi))
    assert set(FORMS) == set(get_args(Form))


@pytest.mark.parametrize(("path", "form", "heun"), FINITE)
def test_every_form_keeps_the_marginals(path, form, heun):
    """Small steps to a last one of 0.001: mean and deviation of the data, within the noise of 16384 values."""
    sde = SDE(form, last_time=1e-3, heun=heun)
    sample = run(sde, denoiser(path), start((4, 1, 64, 64)), 400)[-1][1]
    assert sample.mean().item() == pytest.approx(MEAN, abs=0.015)
    assert sample.std().item() == pytest.approx(STD, abs=0.015)


@pytest.mark.parametrize("path", PATHS)
def test_last_steps_are_those_of_sit(path):
    x = start((2, 1, 3, 3)).double()
    h, (data, eps) = 0.04, denoiser(path).denoise(x, 0.04)
    t = torch.tensor([h, h], dtype=torch.float64)
    v, score = path.velocity(data, eps, t), path.score(eps, t)
    alpha, sigma = expand(path.alpha(t), x), expand(path.sigma(t), x)
    expected = {
        "mean": x + (v + 1.5 * sigma * score) * h,
        "tweedie": x / alpha + sigma**2 / alpha * score,
        "euler": x + v * h,
    }
    for rule, result in expected.items():
        actual = SDE(norm=1.5, last_step=rule)._last(denoiser(path), x, h)
        assert torch.allclose(actual, result, rtol=1e-9), rule


def test_the_grid_of_the_sde_is_that_of_sit():
    times = []
    trajectory = run(SDE(), denoiser(Linear(), 0.0, times=times), start((2, 1, 2, 2)).double(), 250)
    assert times == pytest.approx((1 - torch.linspace(0, 0.96, 250, dtype=torch.float64)).tolist())
    assert [t for t, _ in trajectory] == pytest.approx([*times[1:], 0.0])
    assert len(times) == 250, "one evaluation gives drift and score"
    times.clear()
    run(SDE(), denoiser(Linear(), 1e-3, 0.999, times), start((2, 1, 2, 2)), 250)
    assert (times[0], times[-1]) == pytest.approx((0.999, 0.04))
    times.clear()
    states = run(SDE(last_step="none"), denoiser(Linear(), 1e-3, times=times), start((2, 1, 2, 2)), 10)
    assert len(times) == len(states) == 10
    assert min(times) == pytest.approx((1 - 1e-3) / 10 + 1e-3)


@pytest.mark.parametrize("path", PATHS)
def test_one_step_of_each_method_is_its_formula(path):
    x, now, after = start((3, 1, 2, 2)).double(), 0.6, 0.5
    of, h = denoiser(path), now - after
    z = noise_of(x)(0).double()

    def w(time):
        return path.sigma(torch.tensor([time], dtype=torch.float64)).item()

    def drift(state, time):
        t = torch.full((3,), time, dtype=torch.float64)
        data, eps = of.fn(state, t)
        return path.velocity(data, eps, t) + w(time) * path.score(eps, t)

    noise = math.sqrt(2 * w(now) * h) * z
    euler = SDE()._euler(of, x, now, after, z)
    assert torch.allclose(euler, x + h * drift(x, now) + noise)
    noisy = x + noise
    first = drift(noisy, now)
    heun = SDE(heun=True)._heun(of, x, now, after, z)
    assert torch.allclose(heun, noisy + h * (first + drift(noisy + h * first, after)) / 2)


@pytest.mark.parametrize("path", [Linear(), GVP()])
def test_what_is_infinite_at_the_start_is_a_user_error(path):
    refused = dict.fromkeys(("euler-maruyama", "uvit-em"), ("sbdm", "t = 1"))
    refused |= dict.fromkeys(("uvit-dpm", "uvit-dpm++"), ("log-SNR", "t = 1"))
    refused["dit-ddpm"] = "DDPMLinear"
    for name, sampler in SAMPLERS.items():
        if not sampler.learned_variance:
            sampler.check(VP(), name)
        if name not in refused:
            sampler.check(path, name)
            continue
        with raises_user_error(name, refused[name]):
            sampler.check(path, name)


@pytest.mark.parametrize("path", [Linear(), GVP()])
def test_sits_ode_takes_two_evaluations_on_every_step_and_ends_at_the_data(path):
    times = []
    x = start((2, 1, 3, 3)).double()
    actual = list(SAMPLERS["sit-ode"].run(denoiser(path, 0.0, times=times), x, 125, noise_of(x)))[-1][1]
    assert len(times) == 250 == SAMPLERS["sit-ode"].nfe(SAMPLERS["sit-ode"].steps)
    assert times[::2] == pytest.approx([1 - i / 125 for i in range(125)])
    assert times[1::2] == pytest.approx([1 - i / 125 for i in range(1, 126)])
    assert torch.allclose(actual, MEAN + STD * x, atol=2e-4)


@pytest.mark.parametrize(("low", "path"), [(0.0, Linear()), (0.0, GVP()), (1e-3, Linear()), (1e-3, VP())])
def test_dopri5_never_asks_beyond_the_interval_and_is_accurate(low, path):
    times = []
    x = start((3, 1, 3, 3))
    states = list(SAMPLERS["dopri5"].run(denoiser(path, low, 0.999, times), x, 4, noise_of(x)))
    assert len(states) == 4
    assert min(times) >= low * (1 - 1e-6)
    assert max(times) <= 0.9991
    scale = torch.tensor([0.999])
    std = (path.alpha(scale).square() * STD**2 + path.sigma(scale).square()).sqrt()
    expected = MEAN + STD / std * (x - path.alpha(scale) * MEAN)
    assert torch.allclose(states[-1][1], expected, atol=0.03)  # of rtol 1e-3, over many steps


@pytest.mark.parametrize("form", [form for form in FORMS if form != "sbdm"])  # which these paths refuse
@pytest.mark.parametrize("path", [Linear(), GVP()], ids=lambda path: type(path).__name__)
def test_heun_without_a_last_step_of_its_own_stays_finite(path, form):
    def denoise(x_t, t):
        return x_t, torch.zeros_like(x_t)

    denoiser = Denoiser(denoise, path, low=0.0, high=1.0)
    x = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    *_, (time, end) = SDE(form, last_step="none", heun=True).run(denoiser, x, 5, noise_of(x))
    assert time == 0.0
    assert torch.isfinite(end).all()


def test_a_last_step_longer_than_the_way_is_refused():
    denoiser = Denoiser(lambda x_t, t: (x_t, x_t), Linear(), low=1e-3, high=0.999)
    with raises_user_error("last_time 0.9995", "0.999"):
        list(SDE(last_time=0.9995).run(denoiser, torch.zeros(1, 1, 2, 2), 5, noise_of))
