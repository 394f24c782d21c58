"""Fidelity and diversity from nearest neighbours in feature space; n, m = real and fake images, d = features.

NND_k(x, X) is the Euclidean distance of x to its k-th nearest neighbour in X, excluding x itself. Precision and recall
are defined by Kynkaanniemi et al. (2019), coverage by Naeem et al. (2020).

Distances are computed in tiles of `block` x `block` pairs, with at most 50 block^2 + 48 block d bytes (0.4 GB at the
default and d = 2048) for any n and m. A squared distance is |x|^2 + |y|^2 - 2 x . y in float64, or the sum of squared
differences if this cancels. It is then rounded to float32, so that equal distances are exactly equal for any tiles.
10,000 x 10,000 distances at d = 2048 take 14 s of a CPU core; differences for all pairs would take 110 s.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from uvit_decay.metrics.frechet import check_features
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Positive, check_types

BLOCK = 2048
# Below this fraction of |x|^2 + |y|^2, the rounding error of float64 (a fraction of about 4e-16) would change the
# float32 result.
CANCELS = 1e-7
PAIRS_AT_ONCE = 2**23  # entries in a chunk of differences x - y


@check_types
def precision_recall(
    real: Float[Tensor, "n d"], fake: Float[Tensor, "m _"], k: Positive = 3, block: Positive = BLOCK
) -> tuple[float, float]:
    """Return precision and recall of Kynkaanniemi et al. (2019), as computed by torch-fidelity and ADM (k = 3).

    Precision is the fraction of fake y with |y - x| <= NND_k(x, real) for some real x. Recall is the same with real and
    fake exchanged. Computed on the features' device.

    Args:
        real: features of n real images.
        fake: features of m fake images.
        k: number of the neighbour whose distance is the radius, from 1; less than n and m.
        block: side of a tile of distances; it changes time and memory, not the result.
    """
    check_features("precision and recall", real, fake)
    real_radii = _compute_squared_radii("real", real, k, block)
    fake_radii = _compute_squared_radii("fake", fake, k, block)
    precise = torch.zeros(len(fake), dtype=torch.bool, device=fake.device)
    recalled = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for rows, columns, squared in _tiles(fake, real, block):
        precise[rows] |= (squared <= real_radii[columns]).any(dim=1)
        recalled[columns] |= (squared <= fake_radii[rows, None]).any(dim=0)
    return float(precise.double().mean()), float(recalled.double().mean())


def find_covered(
    real: Float[Tensor, "n d"], fake: Float[Tensor, "m _"], k: int = 5, block: int = BLOCK
) -> Bool[Tensor, " n"]:
    """Return which real images are covered, |y - x| < NND_k(x, real) for some fake y (Naeem et al., 2020).

    Coverage is the fraction of covered images. The ball is open, as in the authors' code. Computed on the features'
    device.
    """
    check_features("coverage", real, fake)
    radii = _compute_squared_radii("real", real, k, block)
    inside = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for _, columns, squared in _tiles(fake, real, block):
        inside[columns] |= (squared < radii[columns]).any(dim=0)
    return inside


def nearest(
    queries: Float[Tensor, "q d"], keys: Float[Tensor, "n d"], k: int, block: int = BLOCK
) -> tuple[Float[Tensor, "q k"], Int64[Tensor, "q k"]]:
    """Return the float32 Euclidean distances to the k nearest keys, ascending, and the indices of these keys.

    Keys at equal distances are ordered by index. A query that is also a key has itself as a neighbour, at a distance of
    exactly 0. Computed on the features' device.
    """
    squared, indices = _nearest_squared(queries, keys, k, block)
    return squared.sqrt(), indices


def _compute_squared_radii(side: str, x: Tensor, k: int, block: int) -> Tensor:
    """Return NND_k(x, X)^2 for each x of X, float32 (n,)."""
    if len(x) <= k:
        raise UserError(f"the {k} nearest neighbours need more than {k} {side} images, got {len(x)}")
    squared, _ = _nearest_squared(x, x, k + 1, block)
    return squared[:, k]  # the first neighbour is x itself, or a duplicate of it


def _nearest_squared(queries: Tensor, keys: Tensor, k: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the squared distances to the k nearest keys, float32 ascending, and their indices; ties by index."""
    # topk does not specify the order of ties. So each candidate is one int64: the bits of its float32 distance in the
    # upper half, the index of the key in the lower half. Floats >= 0 are ordered like their bits, so the smallest
    # integers are the nearest keys, with ties by index. `last` is larger than any candidate.
    last = torch.iinfo(torch.int64).max
    best = torch.full((len(queries), k), last, dtype=torch.int64, device=queries.device)
    for rows, columns, squared in _tiles(queries, keys, block):
        indices = torch.arange(columns.start, columns.stop, device=keys.device)
        packed = squared.view(torch.int32).long() << 32 | indices
        # The best k of this tile, then the best k of this and all earlier tiles.
        nearby = packed.topk(min(k, packed.shape[1]), largest=False, sorted=False).values
        candidates = torch.cat([best[rows], nearby], dim=1)
        best[rows] = candidates.topk(k, largest=False).values
    return (best >> 32).int().view(torch.float32), best & 0xFFFFFFFF


def _tiles(a: Tensor, b: Tensor, block: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (rows of a, rows of b, float32 squared distances between them), tile by tile, for all pairs."""
    for i in range(0, len(a), block):
        rows = slice(i, min(i + block, len(a)))
        x = a[rows].double()
        for j in range(0, len(b), block):
            columns = slice(j, min(j + block, len(b)))
            yield rows, columns, _compute_squared_distances(x, b[columns].double())


def _compute_squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |x_i - y_j|^2 of float64 rows, correctly rounded to float32 except for about one value in millions."""
    scale = x.square().sum(dim=1, keepdim=True) + y.square().sum(dim=1)
    squared = torch.addmm(scale, x, y.T, alpha=-2)
    rows, columns = (squared < CANCELS * scale).nonzero(as_tuple=True)
    at_once = max(1, PAIRS_AT_ONCE // x.shape[1])
    for i, j in zip(rows.split(at_once), columns.split(at_once), strict=True):
        squared[i, j] = (x[i] - y[j]).square().sum(dim=1)
    return squared.float()
