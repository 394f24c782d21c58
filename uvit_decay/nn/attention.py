"""Attention of all networks: the one place that chooses how it is computed, by device, dtype and mode.

| tensors | training, where gradients flow through the attention | otherwise |
| --- | --- | --- |
| bfloat16 on a CPU | plain matrix products | the fused kernel |
| all others | the fused kernel | the fused kernel |

The fused kernel is torch's `scaled_dot_product_attention`. Its flash attention for CPUs has a slow backward pass in
bfloat16: forward and backward take 2.3 times (257 tokens, 8 heads of 64 channels) to 5 times (65 tokens of 32 channels)
as long as plain products; in float32 it is as fast as those, and its forward pass alone is the faster in both
(docs/LOG.md). On GPUs torch itself chooses among cuDNN, flash and memory-efficient kernels.

b = batch, h = heads, n = tokens, k = channels of a head.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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
