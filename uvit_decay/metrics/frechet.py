"""The Frechet distance between two sets of features, known as FID for features of Inception (Heusel et al., 2017).

    d^2 = |mu_1 - mu_2|^2 + tr(S_1 + S_2 - 2 (S_1 S_2)^(1/2))

n = images, d = features, mu = mean, S = covariance; everything in float64.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torchmetrics import Metric

from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, check_types


class Statistics(NamedTuple):
    """Mean and unbiased covariance of a set of features."""

    mean: Float64[Tensor, " d"]
    cov: Float64[Tensor, "d d"]


@check_types
def frechet_distance(a: Statistics, b: Statistics) -> float:
    """Return d^2 of two Gaussians with these statistics.

    The trace of the root is the sum of the singular values of S_1^(1/2) S_2^(1/2). Eigenvalues of S that are 0 up to
    rounding are left out. So with fewer images than features no regularisation is needed, and no accuracy is lost.
    """
    roots = _root(a.cov).T @ _root(b.cov.to(a.cov.device))
    cross = torch.linalg.svdvals(roots).sum()
    total = a.cov.trace() + b.cov.trace().to(a.cov.device)
    of_means = (a.mean - b.mean.to(a.mean.device)).square().sum()
    squared = float(of_means + total - 2 * cross)
    return max(squared, 0.0)  # rounding makes it negative for equal statistics


def _root(cov: Tensor) -> Tensor:
    """Return U D^(1/2) of cov = U D U', (d, rank): a root up to a rotation, which leaves singular values unchanged."""
    values, vectors = torch.linalg.eigh(cov)
    rounding = values[-1] * len(values) * torch.finfo(values.dtype).eps
    positive = values > rounding
    return vectors[:, positive] * values[positive].sqrt()


@check_types
class Moments(Metric):
    """Streaming mean and covariance of batches of features, on one or more processes: update(features), then compute().

    Only the sums of 1, x and x x' are stored, and added up over processes. Their float64 precision is sufficient for
    features with large means: at 80 standard deviations, the maximum in Inception, the covariance is accurate to 1e-11.

    Args:
        dim: length d of a feature vector, 2 or more.
        sync: add up over processes. If false, one process may compute alone.
    """

    full_state_update = False

    def __init__(self, dim: Annotated[int, Bounds(2)], sync: bool = True) -> None:
        # At least 2: torchmetrics drops the shape of tensors with one element.
        super().__init__(sync_on_compute=sync)
        self.add_state("n", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("sum", torch.zeros(dim, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("outer", torch.zeros(dim, dim, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, features: Float[Tensor, "n d"]) -> None:
        """Add a batch of features of any float dtype; large batches are faster."""
        x = features.double()
        self.n += len(x)
        self.sum += x.sum(0)
        self.outer += x.T @ x

    def compute(self) -> Statistics:
        """Return the statistics over all batches, and with `sync` over all processes."""
        n = int(self.n)
        if n < 2:
            raise UserError(f"the Frechet distance needs at least two images on each side, got {n}")
        mean = self.sum / n
        cov = (self.outer - n * torch.outer(mean, mean)) / (n - 1)
        return Statistics(mean, cov)


def check_features(metric: str, real: Tensor, fake: Tensor) -> None:
    """Raise a UserError unless two sets of features, (n, d) and (m, d), are not empty, finite and of equal width d."""
    if not (len(real) and len(fake)):
        raise UserError(f"{metric}: {len(real)} real and {len(fake)} fake images, give one or more of both")
    if real.shape[1] != fake.shape[1]:
        raise UserError(f"{metric}: {real.shape[1]} features per real image, but {fake.shape[1]} per fake image")
    if not (real.isfinite().all() and fake.isfinite().all()):
        raise UserError(f"{metric}: features hold NaN or infinity")
