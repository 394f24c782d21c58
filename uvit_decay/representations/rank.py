"""Entropy of the spectrum of features (Sec. 6 of the paper), their effective rank (Roy and Vetterli), and collapse."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.terminal.typed import check_types

Centre = Literal["sample", "feature"]


@check_types
def spectrum_entropy(features: Float[Tensor, "n d"], centre: Centre = "sample") -> float:
    """Return rho = -sum_i p_i log p_i, p_i = sigma_i / sum_j sigma_j, in nats: what the paper calls effective rank.

    sigma_i are the singular values of the n x n covariance between samples. Up to a factor they are the eigenvalues of
    X X' and of X'X, where X are the centred features. The smaller of the two matrices is decomposed, in float64.
    Features that are constant up to rounding have rho = 0; the largest value is log(min(n, d)).

    Args:
        features: features of n samples.
        centre: subtract each sample's mean over its features (the paper, literally), so that the mean over the samples
            stays, or each feature's mean over the samples.
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
    return float(rho)


@check_types
def effective_rank_exp(features: Float[Tensor, "n d"], centre: Centre = "feature") -> float:
    """Return exp(rho), in [1, min(n, d)]: the effective rank of the covariance between samples.

    Roy and Vetterli 2007, "The effective rank: a measure of effective dimensionality".

    Args:
        features: features of n samples.
        centre: subtract each feature's mean over the samples, or each sample's mean over its features.
    """
    return math.exp(spectrum_entropy(features, centre))


@check_types
def mean_share(features: Float[Tensor, "layers n d"]) -> Float[Tensor, " layers"]:
    """Return |mean of f|^2 / mean of |f|^2 over n samples, in float64: 1 for features that are all the same.

    The features of a network can collapse into their mean without a fall of the ranks, which are computed after
    centring.
    """
    f = features.double()
    mean = f.mean(dim=1).square().sum(-1)
    total = f.square().sum(-1).mean(dim=1)
    return torch.where(total > 0, mean / total, 1.0).clamp(max=1.0)  # rounding can exceed 1
