"""MIND against optimal transport."""

from importlib import import_module

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F

from uvit_decay.metrics import mind
from uvit_decay.runtime.random import normal

module = import_module("uvit_decay.metrics.mind")  # the subpackage has the function by this name


def features(n, d=8, seed=0, shift=0.0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).exp() + shift


def projected(side, count):
    """Return the numbers of each direction, float64 (count, n)."""
    directions = normal("sliced Wasserstein", rows=torch.arange(count), shape=(side.shape[1],))
    return (F.normalize(directions, dim=1).double() @ side.double().T).numpy()


@pytest.mark.parametrize(("n", "m"), [(12, 12), (12, 8), (5, 9), (1, 7)])
def test_each_direction_is_optimal_transport(n, m):
    """Of m copies of each x to n copies of each y, by linear programming."""
    real, fake = features(n, seed=1), features(m, seed=2, shift=0.5)
    transported = []
    for x, y in zip(projected(real, 5), projected(fake, 5), strict=True):
        costs = (np.repeat(x, m)[:, None] - np.repeat(y, n)[None]) ** 2
        transported.append(costs[scipy.optimize.linear_sum_assignment(costs)].mean())
    assert mind(real, fake, 5) == pytest.approx(3 * 8 * np.mean(transported), rel=1e-5)


def test_it_is_a_function_of_the_sets_alone(monkeypatch):
    real, fake = features(40, seed=5), features(30, seed=6)
    value = mind(real, fake, 100)
    torch.manual_seed(8)
    order = torch.randperm(40)
    assert mind(real[order], fake, 100) == pytest.approx(value, rel=1e-6)
    assert mind(fake, real, 100) == pytest.approx(value, rel=1e-6)
    assert mind(real.repeat(3, 1), fake, 100) == pytest.approx(value, rel=1e-6)
    assert mind(real, real, 9) == 0
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    assert mind(real, fake, 100) == pytest.approx(value, rel=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert mind(real, fake, 100) == pytest.approx(value, rel=1e-6)
