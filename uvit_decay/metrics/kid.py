"""The kernel distance between two sets of features, known as KID for features of Inception (Binkowski et al., 2018).

    k(x, y) = (x . y / d + 1)^3
    MMD^2 = mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j)

It is the mean of the unbiased estimate MMD^2 over random subsets; n, m = real and fake images, d = features.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.metrics.frechet import check_features
from uvit_decay.runtime.errors import check_whole


def kernel_distance(
    real: Float[Tensor, "n d"],
    fake: Float[Tensor, "m _"],  # d, too; checked below, with a UserError
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 2020,
) -> tuple[float, float]:
    """Return mean and standard deviation (ddof 0) of MMD^2 over the subsets, in float64 on the features' device.

    The subsets are torch-fidelity's for the fake images as its input 1 and the real ones as its input 2. The mean is
    unbiased and can be negative.
    """
    check_features("the kernel distance", real, fake)
    check_whole(2, min(len(real), len(fake)), subset_size=subset_size)
    stream = np.random.RandomState(seed)  # noqa: NPY002 - torch-fidelity uses the legacy generator

    def drawn(x: Tensor) -> Tensor:
        chosen = torch.from_numpy(stream.choice(len(x), subset_size, replace=False))
        return x[chosen.to(x.device, non_blocking=True)].double()

    values = []
    for _ in range(subsets):
        y = drawn(fake)  # before the real ones, as in torch-fidelity
        values.append(squared_mmd(drawn(real), y))
    estimates = torch.stack(values)
    return float(estimates.mean()), float(estimates.std(correction=0))


def squared_mmd(x: Float[Tensor, "s d"], y: Float[Tensor, "s d"]) -> Float[Tensor, ""]:
    """Return the unbiased MMD^2 of two sets of the same size s."""
    s = len(x)
    within = [(k.sum() - k.trace()) / (s * (s - 1)) for k in (polynomial(x, x), polynomial(y, y))]
    return within[0] + within[1] - 2 * polynomial(x, y).mean()


def polynomial(x: Float[Tensor, "s d"], y: Float[Tensor, "s d"]) -> Float[Tensor, "s s"]:
    """Return k(x, y) = (x . y / d + 1)^3 for all pairs of rows."""
    return (x @ y.T / x.shape[1] + 1) ** 3
