"""The Frechet distance between two sets of features, known as FID when they are Inception's (Heusel et al., 2017).

    d^2 = |mu_1 - mu_2|^2 + tr(S_1 + S_2 - 2 (S_1 S_2)^(1/2))

Only sums are kept, in float64, and added up over processes; n = pictures, d = features.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torchmetrics import Metric

from uvit_decay.errors import UserError

Vector = Float64[Tensor, " d"]
Matrix = Float64[Tensor, "d d"]


def frechet_distance(mean1: Vector, cov1: Matrix, mean2: Vector, cov2: Matrix) -> float:
    """d^2 of two Gaussians; the trace of the root is the sum of roots of the eigenvalues of R S_2 R, where R R = S_1.

    Rank-deficient covariances need no regularisation.
    """
    values, vectors = torch.linalg.eigh(cov1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
    return float((mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * cross)


class FrechetDistance(Metric):
    """Streaming Frechet distance: update(features, real=True or False), then compute().

    Args:
        dim: length d of a feature vector.
    """

    full_state_update = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        for side in ("real", "fake"):
            self.add_state(f"{side}_n", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
            self.add_state(f"{side}_sum", torch.zeros(dim, dtype=torch.float64), dist_reduce_fx="sum")
            self.add_state(f"{side}_outer", torch.zeros(dim, dim, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, features: Float[Tensor, "n d"], real: bool) -> None:
        side = "real" if real else "fake"
        x = features.double()
        for name, value in ((f"{side}_n", len(x)), (f"{side}_sum", x.sum(0)), (f"{side}_outer", x.T @ x)):
            getattr(self, name).add_(value)

    def _statistics(self, side: str) -> tuple[Tensor, Tensor]:
        """Mean and unbiased covariance."""
        n = int(getattr(self, f"{side}_n"))
        if n < 2:
            raise UserError(f"the Frechet distance needs at least two {side} pictures, got {n}")
        mean = getattr(self, f"{side}_sum") / n
        return mean, (getattr(self, f"{side}_outer") - n * torch.outer(mean, mean)) / (n - 1)

    def compute(self) -> float:
        return frechet_distance(*self._statistics("real"), *self._statistics("fake"))
