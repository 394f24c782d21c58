"""Effective rank of features: the entropy of the normalised spectrum of their covariance (Sec. 6 of the paper)."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor


def effective_rank(
    features: Float[Tensor, "n d"], centre: Literal["sample", "feature"] = "sample", exp: bool = False
) -> float:
    """rho = -sum_i p_i log p_i, p_i = sigma_i / sum_j sigma_j, natural logarithm, in float64.

    sigma_i are the singular values of the n x n covariance between samples, found from the n x d matrix: they are its
    squared singular values up to a factor. `centre` subtracts each sample's mean over its features (the paper,
    literally) or each feature's mean over the samples. `exp` gives exp(rho), the effective rank of Roy and Vetterli.
    """
    x = features.double()
    x = x - x.mean(dim=1 if centre == "sample" else 0, keepdim=True)
    sigma = torch.linalg.svdvals(x).square()
    p = sigma / sigma.sum().clamp(min=torch.finfo(sigma.dtype).tiny)  # constant features have rank 0
    rho = torch.special.entr(p).sum()
    return float(rho.exp() if exp else rho)
