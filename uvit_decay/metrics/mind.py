"""MIND, the scaled sliced Wasserstein distance between two sets of features (arXiv 2605.06797).

    MIND = 3 d mean_u W^2(u . x, u . y),    W^2 = integral over q in (0, 1) of (F_x^-1(q) - F_y^-1(q))^2

n, m = real and fake images, d = features, u = unit vectors, F^-1 = the quantiles of the numbers u . x of all images.
For normal distributions that differ only in their means, MIND is 3 |mu_x - mu_y|^2. Scale and power are the same as in
torch-fidelity, which needs equal numbers of real and fake images; here quantiles are exact for any n and m.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from uvit_decay.metrics.frechet import check_features
from uvit_decay.runtime.precision import computing
from uvit_decay.runtime.random import normal
from uvit_decay.terminal.typed import Positive, check_types

_AT_ONCE = 64  # projections; of 50,000 images they take 26 MB


@check_types
def mind(
    real: Float[Tensor, "n d"],
    fake: Float[Tensor, "m _"],  # also d wide; checked below, with a UserError
    projections: Positive,
) -> float:
    """Return MIND, 3 d times the mean of the squared 2-Wasserstein distance over random directions.

    Direction i is uniform on the sphere and depends only on (i, d), so several networks are compared in the same
    directions. Each W^2 is exact for any n and m, because quantiles are step functions, without interpolation. Features
    are projected in float32, distances computed in float64, on the features' device.

    Args:
        real: features of n real images.
        fake: features of m fake images.
        projections: number of directions, from 1.
    """
    check_features("MIND", real, fake)
    rows, columns, weights = _common_steps(len(real), len(fake), real.device)
    total = torch.zeros((), dtype=torch.float64, device=real.device)
    with computing(real.device, "float32"):
        for numbers in torch.arange(projections, device=real.device).split(_AT_ONCE):
            vectors = normal("sliced Wasserstein", rows=numbers, shape=(real.shape[1],))
            directions = F.normalize(vectors, dim=1)
            x = _sort_projections(directions, real)
            y = _sort_projections(directions, fake)
            total += ((x[:, rows] - y[:, columns]).square() @ weights).sum()
    return 3 * real.shape[1] * float(total) / projections


def _sort_projections(directions: Tensor, features: Tensor) -> Tensor:
    """Return the projections of features (n, d) on each direction, (directions, n) float64, ascending."""
    return (directions @ features.T).sort(dim=1).values.double()


def _common_steps(
    n: int, m: int, device: torch.device
) -> tuple[Int64[Tensor, " s"], Int64[Tensor, " s"], Float64[Tensor, " s"]]:
    """Return the steps on which the quantiles of n and of m sorted numbers are constant: both indices, and the length.

    In units of 1 / (n m) all ends of steps are whole numbers.
    """
    ends_of_n = torch.arange(1, n + 1, device=device) * m
    ends_of_m = torch.arange(1, m + 1, device=device) * n
    ends = torch.cat([ends_of_n, ends_of_m]).unique()
    starts = F.pad(ends[:-1], (1, 0))
    return starts // m, starts // n, (ends - starts).double() / (n * m)
