"""Effective rank of features, the entropy of their covariance's spectrum (Sec. 6 of the paper), and collapse."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor


def effective_rank(
    features: Float[Tensor, "n d"], centre: Literal["sample", "feature"] = "sample", exp: bool = False
) -> float:
    """Return rho = -sum_i p_i log p_i, p_i = sigma_i / sum_j sigma_j, natural logarithm, in float64.

    sigma_i are the singular values of the n x n covariance between samples. Up to a factor they are the eigenvalues of
    X X' and of X'X, X being the centred features, and the smaller of the two matrices is decomposed. `centre` subtracts
    each sample's mean over its features (the paper, literally) or each feature's mean over the samples. `exp` returns
    exp(rho), the effective rank of Roy and Vetterli. Features that are constant up to rounding have rho = 0.
    """
    x = features.double()
    rounding = 1e-26 * x.square().sum()
    x = x - x.mean(dim=1 if centre == "sample" else 0, keepdim=True)
    gram = x.T @ x if len(x) > x.shape[1] else x @ x.T
    sigma = torch.linalg.eigvalsh(gram).clamp(min=0)
    total = sigma.sum()
    rho = torch.where(total > rounding, torch.special.entr(sigma / total).sum(), 0.0)
    return float(rho.exp() if exp else rho)


def mean_share(features: Float[Tensor, "layers n d"]) -> Float[Tensor, " layers"]:
    """Return |mean of f|^2 / mean of |f|^2 over n samples, in float64: 1 for features that are all the same.

    A network can collapse into its mean while the ranks, which centre, still see the little that is left.
    """
    f = features.double()
    mean, total = f.mean(dim=1).square().sum(-1), f.square().sum(-1).mean(dim=1)
    return torch.where(total > 0, mean / total, 1.0).clamp(max=1.0)  # beyond 1 by rounding
