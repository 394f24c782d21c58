"""Effective rank of features, the entropy of the spectrum of their covariance (Sec. 6 of the paper), and collapse."""

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
    X X' and of X'X, where X are the centred features. The smaller of the two matrices is decomposed. Features that are
    constant up to rounding have rho = 0.

    Args:
        features: features of n samples.
        centre: subtract each sample's mean over its features (the paper, literally), or each feature's mean over the
            samples.
        exp: return exp(rho), the effective rank of Roy and Vetterli.
    """
    x = features.double()
    rounding = 1e-26 * x.square().sum()
    averaged = 1 if centre == "sample" else 0
    x = x - x.mean(dim=averaged, keepdim=True)
    n, d = x.shape
    gram = x.T @ x if n > d else x @ x.T
    sigma = torch.linalg.eigvalsh(gram).clamp(min=0)
    total = sigma.sum()
    rho = torch.where(total > rounding, torch.special.entr(sigma / total).sum(), 0.0)
    if exp:
        rho = rho.exp()
    return float(rho)


def mean_share(features: Float[Tensor, "layers n d"]) -> Float[Tensor, " layers"]:
    """Return |mean of f|^2 / mean of |f|^2 over n samples, in float64: 1 for features that are all the same.

    The features of a network can collapse into their mean without a fall of the ranks, which are computed after
    centring.
    """
    f = features.double()
    mean = f.mean(dim=1).square().sum(-1)
    total = f.square().sum(-1).mean(dim=1)
    return torch.where(total > 0, mean / total, 1.0).clamp(max=1.0)  # rounding can exceed 1
