"""CKNNA against the formulas as they are printed, with matrices of all pairs, and what it must not depend on."""

import pytest
import torch

from uvit_decay.representations import reference
from uvit_decay.representations.reference import Neighbourhood, cknna


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hsic(k, loss):
    """Song et al. (2012), Eq. 5, with matrices whose diagonals are 0."""
    n, ones = len(k), torch.ones(len(k), dtype=torch.float64)
    trace = torch.trace(k @ loss)
    sums = (ones @ k @ ones) * (ones @ loss @ ones) / ((n - 1) * (n - 2))
    return (trace + sums - 2 * (ones @ k @ loss @ ones) / (n - 2)) / (n * (n - 3))


def naive(a, b, k):
    """CKNNA by loops over all pairs, in float64."""
    kernels = []
    for x in (a.double(), b.double()):
        x = x / x.norm(dim=1, keepdim=True)
        kernels.append(x @ x.T)
    near = []
    for kernel in kernels:
        rows = [sorted((j for j in range(len(kernel)) if j != i), key=lambda j, i=i, kernel=kernel: -kernel[i, j])
                for i in range(len(kernel))]  # fmt: skip
        near.append([set(row[:k]) for row in rows])

    def align(p, q):
        masked = [torch.zeros_like(kernels[0]) for _ in range(2)]
        for i in range(len(a)):
            for j in near[p][i] & near[q][i]:
                masked[0][i, j], masked[1][i, j] = kernels[p][i, j], kernels[q][i, j]
        return hsic(*masked)

    return float(align(0, 1) / ((align(0, 0) * align(1, 1)).sqrt() + 1e-6))


def measured(a, b, k=10):
    return float(cknna(Neighbourhood.of(a, k), Neighbourhood.of(b, k)))


@pytest.mark.parametrize("k", [3, 10])
def test_it_is_the_formula(k, monkeypatch):
    a = normal(40, 6)
    b = a @ normal(6, 9, seed=1) + 0.5 * normal(40, 9, seed=2)
    expected = naive(a, b, k)
    assert 0.02 < expected < 0.98
    assert measured(a, b, k) == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr(reference, "SIMILARITIES", 7 * 40)  # seven rows at a time
    assert measured(a, b, k) == pytest.approx(expected, abs=1e-5)


def test_where_the_estimate_is_negative_it_is_zero():
    ring = Neighbourhood(torch.arange(1, 51)[:, None] % 50, torch.ones(50, 1, dtype=torch.float64))  # none is mutual
    assert ring.alignment(ring) < 0
    assert float(cknna(ring, Neighbourhood.of(normal(50, 4), 1))) == 0.0
