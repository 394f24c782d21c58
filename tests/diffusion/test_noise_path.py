"""The noise paths against published numbers, their own equations, and finite differences."""

import math

import pytest
import torch

from uvit_decay.diffusion.noise_path import GVP, VP, DDPMLinear, Linear, SDDiscrete

VPS = [VP(), VP(beta_min=0.5, beta_max=12.0)]
SDS = [SDDiscrete(), SDDiscrete(beta_start=0.0001, beta_end=0.02), DDPMLinear()]
INTERPOLANTS = [Linear(), GVP()]
PATHS = [*VPS, *SDS, *INTERPOLANTS]
TIMES = torch.linspace(0, 1, 101, dtype=torch.float64)
INNER = TIMES[1:-1] + 2e-4  # between the corners of a discrete schedule
ABAR = {
    VP(): {0.0: 1.0, 0.1: 0.896282, 0.25: 0.523680, 0.5: 0.0790638, 0.75: 0.00344141, 1.0: 4.3186e-5},
    SDDiscrete(): {0.0: 1.0, 0.001: 0.99915, 0.5: 0.277670, 1.0: 0.00466010},
    DDPMLinear(): {0.0: 1.0, 0.001: 0.9999, 0.5: 0.0785872, 1.0: 4.03583e-05},
    GVP(): {0.0: 1.0, 1 / 3: 0.75, 0.5: 0.5, 2 / 3: 0.25, 1.0: 0.0},
}
KNOWN = [(path, t, abar) for path, values in ABAR.items() for t, abar in values.items()]


def batch(seed, n=101, dtype=torch.float64):
    return torch.randn(n, 2, 3, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def inner_and_end(path):
    """Return TIMES above 0, and below 1 where alpha_1 = 0."""
    return TIMES[1:-1] if path in INTERPOLANTS else TIMES[1:]


@pytest.mark.parametrize(("path", "t", "abar"), KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_paths_have_the_published_noise_levels(path, t, abar, dtype):
    t = torch.tensor([t], dtype=dtype)
    assert path.alpha(t).square().item() == pytest.approx(abar, rel=2e-5, abs=1e-14)
    assert path.sigma(t).square().item() == pytest.approx(1 - abar, rel=2e-5, abs=1e-7)
    assert {f(t).dtype for f in (path.alpha, path.sigma, path.drift, path.diffusion2)} == {dtype}


@pytest.mark.parametrize("path", PATHS)
def test_noise_only_grows_and_variance_is_preserved_but_on_the_straight_path(path):
    assert (path.alpha(TIMES).diff() < 0).all()
    assert (path.sigma(TIMES).diff() > 0).all()
    assert path.alpha(TIMES[:1]) == 1
    assert path.sigma(TIMES[:1]) == 0
    if path == Linear():
        assert torch.equal(path.alpha(TIMES), 1 - TIMES)
        assert torch.equal(path.sigma(TIMES), TIMES)
    else:
        variance = path.alpha(TIMES).square() + path.sigma(TIMES).square()
        assert torch.allclose(variance, torch.ones(101).double(), atol=1e-14)


@pytest.mark.parametrize("path", PATHS)
def test_slopes_drift_and_diffusion_are_the_derivatives_of_the_levels(path):
    h = 1e-5

    def slope(f):
        return (f(INNER + h) - f(INNER - h)) / (2 * h)

    assert torch.allclose(path.d_alpha_t(INNER), slope(path.alpha), rtol=1e-6)
    assert torch.allclose(path.d_sigma_t(INNER), slope(path.sigma), rtol=1e-6)
    rtol = 1e-6 if path in INTERPOLANTS else 1e-8  # large near t = 1
    assert torch.allclose(path.drift(INNER), slope(lambda t: path.alpha(t).log()), rtol=rtol)
    needed = slope(lambda t: path.sigma(t).square()) - 2 * path.drift(INNER) * path.sigma(INNER).square()
    assert torch.allclose(path.diffusion2(INNER), needed, rtol=1e-8)


@pytest.mark.parametrize("path", VPS)
def test_sigma_is_accurate_in_float32_at_tiny_times(path):
    for t in (1e-7, 1e-5, 1e-4, 1e-3, 1e-2):
        t32 = torch.tensor([t], dtype=torch.float32)
        integral = path.beta_min * t32.item() + 0.5 * (path.beta_max - path.beta_min) * t32.item() ** 2
        expected = math.sqrt(-math.expm1(-integral))
        assert path.sigma(t32).item() == pytest.approx(expected, rel=5e-7), t


def sd_betas(path):
    if isinstance(path, DDPMLinear):
        return [path.beta_start + (path.beta_end - path.beta_start) * i / 999 for i in range(1000)]
    low, high = math.sqrt(path.beta_start), math.sqrt(path.beta_end)
    return [(low + (high - low) * i / 999) ** 2 for i in range(1000)]


@pytest.mark.parametrize("path", SDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sd_has_the_levels_of_its_betas(path, dtype):
    t = torch.arange(1001, dtype=dtype) / 1000
    rel = 1e-6 if dtype == torch.float32 else 1e-11
    abar, alphas, drifts = 1.0, path.alpha(t).tolist(), path.drift(t).tolist()
    sigmas, diffusions = path.sigma(t).tolist(), path.diffusion2(t).tolist()
    assert (alphas[0], sigmas[0]) == (1.0, 0.0)
    for n, beta in enumerate(sd_betas(path), start=1):
        abar *= 1 - beta
        assert alphas[n] == pytest.approx(math.sqrt(abar), rel=rel), n
        assert sigmas[n] == pytest.approx(math.sqrt(1 - abar), rel=rel), n
        # At the corner t_n, the slope of the interval that ends there: rounding of t must not choose.
        assert drifts[n] == pytest.approx(500 * math.log1p(-beta), rel=rel), n
        assert diffusions[n] == pytest.approx(-1000 * math.log1p(-beta), rel=rel), n


@pytest.mark.parametrize("path", SDS)
def test_sd_is_straight_in_log_alpha_between_its_levels(path):
    n = torch.arange(1000, dtype=torch.float64)
    before, after = path.alpha(n / 1000).log(), path.alpha((n + 1) / 1000).log()
    for share in (0.25, 0.7):
        expected = (1 - share) * before + share * after
        assert torch.allclose(path.alpha((n + share) / 1000).log(), expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("path", SDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sd_trains_at_each_of_its_levels_alike(path, dtype):
    u = (torch.arange(5000, dtype=dtype) + 0.5) / 5000
    levels, counts = path.times(u).unique(return_counts=True)
    assert torch.equal(levels, torch.arange(1, 1001, dtype=dtype) / 1000)
    assert (counts == 5).all()
    edges = torch.tensor([0.0, 1e-9, 0.0010005, 0.5, 0.99999], dtype=dtype)
    assert torch.equal(path.times(edges), torch.tensor([0.001, 0.001, 0.002, 0.5, 1.0], dtype=dtype))


@pytest.mark.parametrize("path", [*VPS, *INTERPOLANTS])
def test_a_continuous_path_trains_at_the_times_it_is_given(path):
    assert torch.equal(path.times(TIMES), TIMES)


@pytest.mark.parametrize("path", PATHS)
def test_coefficients_stay_on_the_device_of_their_times(path):
    t = torch.empty(3, device="meta")
    coefficients = (path.alpha, path.sigma, path.d_alpha_t, path.d_sigma_t, path.drift, path.diffusion2)
    for f in (*coefficients, path.times):
        assert (f(t).device, f(t).dtype, f(t).shape) == (t.device, t.dtype, t.shape)


def test_a_table_made_in_inference_mode_serves_training():
    path = SDDiscrete(beta_end=0.0123)  # in no table yet
    with torch.inference_mode():
        path.alpha(TIMES)
    x = batch(0).requires_grad_()
    path.add_noise(x, batch(1), TIMES).square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_conversions_are_inverse_for_any_prediction(path):
    t = inner_and_end(path)
    x_t, guess = batch(2, len(t)), batch(3, len(t))
    data = path.x_from_eps(x_t, guess, t)
    assert torch.allclose(path.add_noise(data, guess, t), x_t, atol=1e-10)
    assert torch.allclose(path.eps_from_x(x_t, data, t), guess, atol=1e-10)
    assert torch.allclose(path.eps_from_score(path.score(guess, t), t), guess, atol=1e-12)
    noise = path.eps_from_x(x_t, guess, t)
    assert torch.allclose(path.x_from_eps(x_t, noise, t), guess, atol=1e-10)
    parts = path.x_eps_from_velocity(x_t, guess, t)
    assert torch.allclose(path.velocity(*parts, t), guess, atol=1e-10)
    assert torch.allclose(path.add_noise(*parts, t), x_t, atol=1e-10)


@pytest.mark.parametrize("path", INTERPOLANTS)
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_the_velocity_of_an_interpolant_is_finite_and_tells_all_at_both_ends(path, end):
    x, eps, t = batch(0), batch(1), torch.full((101,), end, dtype=torch.float64)
    v = path.velocity(x, eps, t)
    assert torch.allclose(v, {Linear(): x - eps, GVP(): math.pi / 2 * (end * x - (1 - end) * eps)}[path], atol=1e-14)
    for actual, expected in zip(path.x_eps_from_velocity(path.add_noise(x, eps, t), v, t), (x, eps), strict=True):
        assert torch.allclose(actual, expected, atol=1e-14)
