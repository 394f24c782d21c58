"""Layers below a block: attention by device and dtype, and norms."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from uvit_decay.runtime.errors import check_choice

Heads = Float[Tensor, "b h n k"]


def attention(q: Heads, k: Heads, v: Heads) -> Heads:
    """Return softmax(q k^T / sqrt(k)) v for each head, by the fastest way for device, dtype and mode."""
    # A frozen network gets no gradient, even where gradients are enabled.
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if trains and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _plain_attention(q, k, v)
    return scaled_dot_product_attention(q, k, v)


def _plain_attention(q: Heads, k: Heads, v: Heads) -> Heads:
    """Return the same by two matrix products; the weights of all pairs of tokens are kept for the backward pass."""
    batch, heads, _, channels = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # contiguous: products of strided ones take twice as long
    unused = q.new_empty(())  # the product's alpha is the scale, which costs no pass over q; beta = 0 reads nothing
    weights = torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=channels**-0.5).softmax(dim=-1)
    return (weights @ v).unflatten(0, (batch, heads))


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
