"""The kernel distance between two sets of features, known as KID for features of Inception (Binkowski et al., 2018).

    k(x, y) = (x . y / d + 1)^3
    MMD^2 = mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j)

The distance is the mean of the unbiased estimate MMD^2 over random subsets; n, m = real and fake images, d = features.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.metrics.frechet import check_features
from uvit_decay.terminal.typed import Bounds, Positive, Seed, check_types


@check_types
def kernel_distance(
    real: Float[Tensor, "n d"],
    fake: Float[Tensor, "m _"],  # also d wide; checked below, with a UserError
    subsets: Positive = 100,
    subset_size: Annotated[int, Bounds(2)] = 1000,
    seed: Seed = 2020,
) -> tuple[float, float]:
    """Return mean and standard deviation (ddof 0) of MMD^2 over the subsets, in float64 on the features' device.

    The subsets are torch-fidelity's with fake images as its input 1 and real images as its input 2. The mean is
    unbiased and can be negative.

    Args:
        real: features of n real images.
        fake: features of m fake images.
        subsets: number of pairs of random subsets.
        subset_size: images in a subset, drawn without replacement; from 2 to the smaller of n and m.
        seed: seed of the subsets.
    """
    check_features("the kernel distance", real, fake)
    stream = np.random.RandomState(seed)  # noqa: NPY002 - torch-fidelity uses the legacy generator

    def draw(x: Tensor) -> Tensor:
        chosen = torch.from_numpy(stream.choice(len(x), subset_size, replace=False))
        return x[chosen.to(x.device, non_blocking=True)].double()

    values = []
    for _ in range(subsets):
        y = draw(fake)  # before the real ones, as in torch-fidelity
        x = draw(real)
        values.append(estimate_squared_mmd(x, y))
    estimates = torch.stack(values)
    return float(estimates.mean()), float(estimates.std(correction=0))


def estimate_squared_mmd(x: Float[Tensor, "s d"], y: Float[Tensor, "s d"]) -> Float[Tensor, ""]:
    """Return the unbiased MMD^2 of two sets of the same size s."""
    return _mean_of_others(polynomial(x, x)) + _mean_of_others(polynomial(y, y)) - 2 * polynomial(x, y).mean()


def _mean_of_others(kernel: Float[Tensor, "s s"]) -> Float[Tensor, ""]:
    """Return the mean over all i != j."""
    s = len(kernel)
    return (kernel.sum() - kernel.trace()) / (s * (s - 1))


def polynomial(x: Float[Tensor, "s d"], y: Float[Tensor, "s d"]) -> Float[Tensor, "s s"]:
    """Return k(x, y) = (x . y / d + 1)^3 for all pairs of rows."""
    return (x @ y.T / x.shape[1] + 1) ** 3
