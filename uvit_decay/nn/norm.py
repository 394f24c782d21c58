"""Norms of tokens by name, and the norm of queries and keys, which keeps the logits of attention bounded.

`layer` is LayerNorm, that of the published networks. `rms` is RMSNorm (Zhang and Sennrich, NeurIPS 2019): it divides by
the root mean square alone, without centring and without a bias.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.runtime.errors import check_choice

NormType = Literal["layer", "rms"]
Norm = nn.LayerNorm | nn.RMSNorm


def build_norm(kind: NormType, dim: int, eps: float, affine: bool = True) -> Norm:
    """Return a norm of the last `dim` values; with `affine` it has learnable scales, and a LayerNorm biases too."""
    check_choice(NormType, norm_type=kind)
    return (nn.RMSNorm if kind == "rms" else nn.LayerNorm)(dim, eps, elementwise_affine=affine)


def normed_heads(norm: Norm, x: Float[Tensor, "b h n k"]) -> Float[Tensor, "b h n k"]:
    """Norm queries or keys, each head and token by itself over its k channels, in the dtype of the norm's scales.

    Under autocast they are bfloat16, the scales and so the statistics float32. The result has the dtype of x.
    """
    return norm(x.to(norm.weight.dtype)).to(x.dtype)
