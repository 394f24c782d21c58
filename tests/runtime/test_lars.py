"""LARS against the equations of MAE's linear probe, computed in float64."""

import numpy as np
import pytest
import torch

from uvit_decay.runtime.optimizers import LARS


def reference(values, gradients, lr, momentum, weight_decay, trust=0.001):
    """Return weights after each step: plain numpy, in float64."""
    w, m = np.array(values, np.float64), 0.0
    for gradient in gradients:
        d, q = np.array(gradient, np.float64), 1.0
        if w.ndim > 1:
            d = d + weight_decay * w
            norms = np.sqrt((w**2).sum()), np.sqrt((d**2).sum())
            if min(norms) > 0:
                q = trust * norms[0] / norms[1]
        m = momentum * m + q * d
        w = w - lr * m
    return w


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2), (5,), ()], ids=str)
def test_every_step_is_that_of_the_equations(shape, weight_decay):
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=shape), random.normal(size=(5, *shape))
    w = torch.nn.Parameter(torch.tensor(start))
    optimizer = LARS([w], lr=6.4, momentum=0.9, weight_decay=weight_decay)
    for gradient in gradients:
        w.grad = torch.tensor(gradient)
        optimizer.step()
    expected = reference(start, gradients, 6.4, 0.9, weight_decay)
    np.testing.assert_allclose(w.detach().numpy(), expected, rtol=1e-12, atol=0)
    assert not np.array_equal(w.detach().numpy(), start)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_matrix_or_a_gradient_of_zeros_is_not_scaled(start):
    w = torch.nn.Parameter(torch.full((2, 2), start))
    optimizer = LARS([w], lr=1.0)
    w.grad = torch.full((2, 2), 1.0 - start)
    optimizer.step()
    assert torch.equal(w.detach(), torch.full((2, 2), -1.0 if start == 0.0 else 1.0))
