"""The entropy of the spectrum and the effective rank against singular values."""

import math

import numpy as np
import pytest
import torch

from uvit_decay.representations.rank import effective_rank_exp, mean_share, spectrum_entropy

SIZES = [(6, 20), (20, 6), (15, 15), (2, 3)]


def features(n, d, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64) * torch.linspace(0.1, 3, d) + torch.linspace(-2, 2, d)


def entropy(spectrum):
    p = np.asarray(spectrum, dtype=np.float64).clip(min=0)
    p = p[p > 0] / p.sum()
    return float(-(p * np.log(p)).sum())


def test_float32_and_bfloat16_features_are_computed_in_float64():
    x = features(30, 12).bfloat16()
    expected = spectrum_entropy(x.double())
    assert spectrum_entropy(x.float()) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert spectrum_entropy(x) == expected


@pytest.mark.parametrize(("n", "d"), [*SIZES, (400, 30)])
@pytest.mark.parametrize("centre", ["sample", "feature"])
@pytest.mark.parametrize("last", [0, -9])
def test_the_spectrum_is_that_of_the_singular_values(n, d, centre, last):
    """Also where it falls fast: the smaller Gram matrix loses tiny ones, and the entropy does not notice."""
    x = features(n, d) * torch.logspace(0, last, d, dtype=torch.float64)
    centred = x - x.mean(dim=1 if centre == "sample" else 0, keepdim=True)
    expected = entropy(torch.linalg.svdvals(centred).square())
    assert spectrum_entropy(x, centre) == pytest.approx(expected, abs=1e-8)
    assert effective_rank_exp(x, centre) == pytest.approx(math.exp(expected), rel=1e-8)


@pytest.mark.parametrize("centre", ["sample", "feature"])
@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_constant_features_have_no_entropy(n, d, value, centre):
    """Not even that of the rounding of their mean."""
    assert spectrum_entropy(torch.full((n, d), value, dtype=torch.float64), centre) == 0
    assert effective_rank_exp(torch.full((n, d), value), centre) == 1


def test_the_share_of_the_mean_is_that_of_the_squared_length():
    f = torch.stack([features(40, 6).float(), 5 + features(40, 6).float(), torch.ones(40, 6), torch.zeros(40, 6)])
    expected = [float(np.square(x.mean(0)).sum() / np.square(x).sum(1).mean()) for x in f[:2].double().numpy()]
    assert mean_share(f).tolist() == pytest.approx([*expected, 1.0, 1.0])
    assert mean_share(3 * f).tolist() == pytest.approx([*expected, 1.0, 1.0])
    assert expected[0] < 0.5 < 0.8 < expected[1]
