"""The kernel distance between two sets of features, known as KID when they are Inception's (Binkowski et al., 2018).

    k(x, y) = (x . y / d + 1)^3
    MMD^2 = mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j)

It is the mean of the unbiased estimate MMD^2 over random subsets; n, m = real and fake pictures, d = features.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.errors import UserError
from uvit_decay.metrics.checks import check_features


def kernel_distance(
    real: Float[Tensor, "n d"],
    fake: Float[Tensor, "m _"],  # d, too; another one is a UserError
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 2020,
) -> tuple[float, float]:
    """Mean and standard deviation (ddof 0) of MMD^2 over the subsets, in float64 on the features' device.

    The subsets are torch-fidelity's when its input 1 is the fake pictures and its input 2 the real ones. The mean is
    unbiased and may fall below 0.

    Raises:
        UserError: subsets larger than a set or of one picture; features that differ in d, or hold NaN or infinity.
    """
    check_features("the kernel distance", real, fake)
    if subset_size < 2:
        raise UserError(f"the kernel distance: subset_size must be at least 2, got {subset_size}")
    for side, x in (("real", real), ("fake", fake)):
        if subset_size > len(x):
            raise UserError(
                f"the kernel distance draws subsets of {subset_size} from {len(x)} {side} pictures: "
                f"set subset_size to at most {min(len(real), len(fake))}"
            )
    stream = np.random.RandomState(seed)  # noqa: NPY002 - torch-fidelity's subsets come from the old stream

    def drawn(x: Tensor) -> Tensor:
        chosen = torch.from_numpy(stream.choice(len(x), subset_size, replace=False))
        return x[chosen.to(x.device)].double()

    values = []
    for _ in range(subsets):
        y = drawn(fake)  # first: torch-fidelity's order
        values.append(squared_mmd(drawn(real), y))
    found = torch.stack(values)
    return float(found.mean()), float(found.std(correction=0))


def squared_mmd(x: Float[Tensor, "s d"], y: Float[Tensor, "s d"]) -> Float[Tensor, ""]:
    """The unbiased MMD^2 of two sets of the same size s."""
    s = len(x)
    within = [(k.sum() - k.trace()) / (s * (s - 1)) for k in (polynomial(x, x), polynomial(y, y))]
    return within[0] + within[1] - 2 * polynomial(x, y).mean()


def polynomial(x: Float[Tensor, "s d"], y: Float[Tensor, "s d"]) -> Float[Tensor, "s s"]:
    """k(x, y) = (x . y / d + 1)^3."""
    return (x @ y.T / x.shape[1] + 1) ** 3
