"""The noise path against published numbers, its own equations, and finite differences."""

import math

import pytest
import torch

from uvit_decay.diffusion.path import VP, expand

VPS = [VP(), VP(beta_min=0.5, beta_max=12.0)]
TIMES = torch.linspace(0, 1, 101, dtype=torch.float64)
INNER = TIMES[1:-1]
ABAR = {0.0: 1.0, 0.1: 0.896282, 0.25: 0.523680, 0.5: 0.0790638, 0.75: 0.00344141, 1.0: 4.3186e-5}


def batch(seed, n=101, dtype=torch.float64):
    return torch.randn(n, 2, 3, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("t", "abar"), ABAR.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_path_has_the_published_noise_levels(t, abar, dtype):
    t = torch.tensor([t], dtype=dtype)
    assert VP().alpha(t).square().item() == pytest.approx(abar, rel=2e-5)
    assert VP().sigma(t).square().item() == pytest.approx(1 - abar, rel=2e-5, abs=1e-7)
    assert VP().alpha(t).dtype == VP().sigma(t).dtype == dtype


@pytest.mark.parametrize("path", VPS)
def test_variance_is_preserved(path):
    assert torch.allclose(path.alpha(TIMES).square() + path.sigma(TIMES).square(), torch.ones(101).double(), atol=1e-14)


@pytest.mark.parametrize("path", VPS)
def test_noise_only_grows(path):
    assert (path.alpha(TIMES).diff() < 0).all()
    assert (path.sigma(TIMES).diff() > 0).all()
    assert path.alpha(TIMES[:1]) == 1
    assert path.sigma(TIMES[:1]) == 0


@pytest.mark.parametrize("path", VPS)
def test_drift_is_the_slope_of_log_alpha(path):
    h = 1e-5
    slope = (path.alpha(INNER + h).log() - path.alpha(INNER - h).log()) / (2 * h)
    assert torch.allclose(path.drift(INNER), slope, rtol=1e-8)


@pytest.mark.parametrize("path", VPS)
def test_diffusion_is_what_the_variance_needs(path):
    h = 1e-5
    slope = (path.sigma(INNER + h).square() - path.sigma(INNER - h).square()) / (2 * h)
    assert torch.allclose(path.diffusion2(INNER), slope - 2 * path.drift(INNER) * path.sigma(INNER).square(), rtol=1e-8)


@pytest.mark.parametrize("path", VPS)
def test_sigma_is_accurate_in_float32_at_tiny_times(path):
    for t in (1e-7, 1e-5, 1e-4, 1e-3, 1e-2):
        t32 = torch.tensor([t], dtype=torch.float32)
        integral = path.beta_min * t32.item() + 0.5 * (path.beta_max - path.beta_min) * t32.item() ** 2
        wanted = math.sqrt(-math.expm1(-integral))
        assert path.sigma(t32).item() == pytest.approx(wanted, rel=5e-7), t


@pytest.mark.parametrize("path", VPS)
def test_noised_is_the_sum_of_its_parts_for_each_sample(path):
    x, eps = batch(0), batch(1)
    x_t = path.noised(x, eps, TIMES)
    for i in (0, 30, 100):
        wanted = path.alpha(TIMES)[i] * x[i] + path.sigma(TIMES)[i] * eps[i]
        assert torch.allclose(x_t[i], wanted, rtol=1e-12)
    assert torch.equal(x_t[0], x[0])


@pytest.mark.parametrize("path", VPS)
def test_conversions_find_data_and_noise_again(path):
    x, eps = batch(0)[1:], batch(1)[1:]
    t = TIMES[1:]
    x_t = path.noised(x, eps, t)
    assert torch.allclose(path.data_from_noise(x_t, eps, t), x, atol=1e-11)
    assert torch.allclose(path.noise_from_data(x_t, x, t), eps, atol=1e-11)


@pytest.mark.parametrize("path", VPS)
def test_conversions_are_inverse_for_any_prediction(path):
    x_t, guess, t = batch(2)[1:], batch(3)[1:], TIMES[1:]
    data = path.data_from_noise(x_t, guess, t)
    assert torch.allclose(path.noise_from_data(x_t, data, t), guess, atol=1e-10)
    noise = path.noise_from_data(x_t, guess, t)
    assert torch.allclose(path.data_from_noise(x_t, noise, t), guess, atol=1e-10)


@pytest.mark.parametrize("path", VPS)
def test_score_is_the_gradient_of_the_log_density(path):
    """For data N(0, s^2 I) the density of x_t is Gaussian, and the best eps is known."""
    s, t = 0.7, TIMES[1:]
    x_t = batch(4)[1:].requires_grad_()
    variance = expand(path.alpha(t).square() * s**2 + path.sigma(t).square(), x_t)
    (gradient,) = torch.autograd.grad((-0.5 * x_t.square() / variance).sum(), x_t)
    data = expand(path.alpha(t), x_t) * s**2 / variance * x_t.detach()
    eps = path.noise_from_data(x_t.detach(), data, t)
    assert torch.allclose(path.score(eps, t), gradient, atol=1e-10)


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 3), (4, 2, 3, 3)])
def test_a_coefficient_multiplies_its_own_sample(shape):
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    product = expand(weights, torch.ones(shape)) * torch.ones(shape)
    assert product.shape == shape
    assert torch.equal(product.reshape(4, -1)[:, 0], weights)
