"""The Frechet distance between two sets of features, known as FID when they are Inception's (Heusel et al., 2017).

    d^2 = |mu_1 - mu_2|^2 + tr(S_1 + S_2 - 2 (S_1 S_2)^(1/2))

n = pictures, d = features, mu = mean, S = covariance; everything in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torchmetrics import Metric

from uvit_decay.errors import UserError

# Of tr S_1 + tr S_2: below it, d^2 < 0 is rounding, and a covariance symmetric.
ROUNDING = 1e-6


class Statistics(NamedTuple):
    """What the distance knows of features: mean, unbiased covariance, pictures (None: unknown, as in many files)."""

    mean: Float64[Tensor, " d"]
    cov: Float64[Tensor, "d d"]
    n: int | None


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """d^2 of two Gaussians.

    The trace of the root is the sum of the singular values of S_1^(1/2) S_2^(1/2). Eigenvalues of S that rounding
    cannot tell from 0 are left out: fewer pictures than features need no regularisation, and cost no accuracy.

    Raises:
        UserError: statistics that differ in d, hold NaN or infinity, or whose cov is no covariance.
    """
    check_statistics("the Frechet distance: the first statistics", a)
    check_statistics("the Frechet distance: the second statistics", b)
    if len(a.mean) != len(b.mean):
        raise UserError(
            f"the Frechet distance: the first statistics are of {len(a.mean)} features, the second of {len(b.mean)}"
        )
    cross = torch.linalg.svdvals(_root(a.cov).T @ _root(b.cov.to(a.cov.device))).sum()
    total = a.cov.trace() + b.cov.trace().to(a.cov.device)
    squared = float((a.mean - b.mean.to(a.mean.device)).square().sum() + total - 2 * cross)
    if squared < -ROUNDING * float(total.abs()):
        raise UserError("the Frechet distance: a covariance has negative eigenvalues, so it is none")
    return max(squared, 0.0)


def check_statistics(problem: str, s: Statistics) -> None:
    """Raise a UserError that begins with `problem` unless these can be mean and covariance of something."""
    if s.cov.shape != (len(s.mean), len(s.mean)):
        raise UserError(f"{problem} have a mean of {len(s.mean)} features and a covariance of {tuple(s.cov.shape)}")
    if not (s.mean.isfinite().all() and s.cov.isfinite().all()):
        raise UserError(f"{problem} hold NaN or infinity")
    if (s.cov - s.cov.T).abs().max() > ROUNDING * s.cov.abs().max():
        raise UserError(f"{problem} have a covariance that is not symmetric")


def _root(cov: Tensor) -> Tensor:
    """U D^(1/2) of cov = U D U', (d, rank): the root up to a rotation, which no singular value sees."""
    values, vectors = torch.linalg.eigh(cov)
    known = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, known] * values[known].sqrt()


class Moments(Metric):
    """Mean and covariance of features that come in batches and on many processes: update(features), then compute().

    Only the sums of 1, x and x x' are kept, and added up over processes. Float64 has digits to spare for features with
    a mean of many standard deviations: where that is 80, as in Inception's quietest, the covariance is good to 1e-11.

    Args:
        dim: length d of a feature vector, 2 or more.
        sync: add up over processes; without it one of them may compute alone.
    """

    full_state_update = False

    def __init__(self, dim: int, sync: bool = True) -> None:
        super().__init__(sync_on_compute=sync)
        if dim < 2:  # torchmetrics returns tensors of one number without their shape
            raise UserError(f"the Frechet distance needs features of two numbers or more, got {dim}")
        self.add_state("n", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("sum", torch.zeros(dim, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("outer", torch.zeros(dim, dim, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, features: Float[Tensor, "n d"]) -> None:
        """Any float type; large batches are faster."""
        if features.shape[1] != len(self.sum):
            raise UserError(f"features of {features.shape[1]} numbers came where {len(self.sum)} were expected")
        x = features.double()
        self.n += len(x)
        self.sum += x.sum(0)
        self.outer += x.T @ x

    def compute(self) -> Statistics:
        """Of all processes.

        Raises:
            UserError: fewer than two pictures.
        """
        n = int(self.n)
        if n < 2:
            raise UserError(f"the Frechet distance needs at least two pictures on each side, got {n}")
        mean = self.sum / n
        return Statistics(mean, (self.outer - n * torch.outer(mean, mean)) / (n - 1), n)
