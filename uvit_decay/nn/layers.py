"""Layers of transformer blocks: attention, MLPs and norms, and the factory that builds the layers of a network.

Another MLP or norm is a class and an entry of `MLPS` or `NORMS`. b = batch, n = tokens, d = width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from uvit_decay.decay.connection import Tokens
from uvit_decay.terminal.errors import UserError

Heads = Float[Tensor, "b h n k"]
Norm = nn.LayerNorm | nn.RMSNorm


def attention(q: Heads, k: Heads, v: Heads) -> Heads:
    """Return softmax(q k^T / sqrt(k)) v for each head, computed in the fastest way for device, dtype and mode."""
    # A frozen network gets no gradient, even if gradients are enabled.
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if trains and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _plain_attention(q, k, v)
    return scaled_dot_product_attention(q, k, v)


def _plain_attention(q: Heads, k: Heads, v: Heads) -> Heads:
    """Return `attention` by two matrix products; the backward pass needs the weights of all pairs of tokens."""
    batch, heads, _, channels = q.shape
    # Contiguous, because products of strided tensors take twice as long.
    q = q.flatten(0, 1)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    unused = q.new_empty(())  # with beta = 0 it is not read; alpha is the scale, without another pass over q
    logits = torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=channels**-0.5)
    weights = logits.softmax(dim=-1)
    return (weights @ v).unflatten(0, (batch, heads))


def norm_heads(norm: Norm, x: Float[Tensor, "b h n k"]) -> Float[Tensor, "b h n k"]:
    """Norm queries or keys over the k channels of each head and token, in the dtype of the norm's scales.

    Under autocast x is bfloat16, but the scales, and so the statistics, are float32. The result has the dtype of x.
    """
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Multi-head self-attention; the rows of `qkv` are ordered [q; k; v], each (head, channel).

    `norm` builds the norms of queries and keys, given a number of channels and eps; None for no norms. They are over
    the channels of a head, before the product of queries and keys, with scales that all heads share. Names are timm's;
    see ViT-22B (Dehghani et al., ICML 2023) and Stable Diffusion 3 (Esser et al., ICML 2024).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        qkv_bias: bool = False,
        norm: Callable[[int, float], Norm] | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise UserError(f"dim {dim} is not divisible by heads {heads}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if norm is not None:
            self.q_norm = norm(dim // heads, eps)
            self.k_norm = norm(dim // heads, eps)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tokens) -> Tokens:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.q_norm is not None:
            q = norm_heads(self.q_norm, q)
            k = norm_heads(self.k_norm, k)
        return self.proj(attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers around a GELU, the exact (erf) one or its approximation by tanh."""

    last_layer = "fc2"

    def __init__(self, dim: int, hidden: int, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tokens) -> Tokens:
        return self.fc2(self.act(self.fc1(x)))


class SwiGLU(nn.Module):
    """Gated MLP W3 (SiLU(a) b) with [a, b] = W12 x (Shazeer, arXiv 2002.05202); the names are LightningDiT's."""

    last_layer = "w3"

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden)
        self.w3 = nn.Linear(hidden, dim)

    def forward(self, x: Tokens) -> Tokens:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(silu(gate) * value)


# Functions (width, hidden width, `approximate` of a GELU) -> module, whose `last_layer` names its last linear layer.
MLPS: dict[str, Callable[[int, int, str], nn.Module]] = {
    "gelu": Mlp,
    # As in LightningDiT. With 2/3 of the hidden width, three matrices have as many weights as the two of an Mlp.
    "swiglu": lambda dim, hidden, _: SwiGLU(dim, int(2 / 3 * hidden)),
}
NORMS: dict[str, type[Norm]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
MlpType = Literal[*MLPS]
NormType = Literal[*NORMS]


@dataclass(frozen=True)
class LayerFactory:
    """Builds the layers of a network. Its fields are arguments of all transformers, by default the published layers.

    Args:
        mlp_ratio: hidden width of the MLPs over their width.
        mlp: kind of the MLPs, a name in `MLPS`.
        norm_type: kind of all norms, also of queries and keys, a name in `NORMS`.
        qk_norm: whether queries and keys are normed.
    """

    mlp_ratio: float = 4.0
    mlp: str = "gelu"
    norm_type: str = "layer"
    qk_norm: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the factory of a network with these arguments."""
        return cls(**{field.name: config[field.name] for field in fields(cls)})

    def build_attention(self, dim: int, heads: int, qkv_bias: bool, eps: float) -> Attention:
        """Return an attention; `eps` is of the norms of queries and keys."""
        return Attention(dim, heads, qkv_bias, self.build_norm if self.qk_norm else None, eps)

    def build_mlp(self, dim: int, approximate: Literal["none", "tanh"] = "none") -> nn.Module:
        """Return an MLP; `approximate` is for a GELU."""
        return MLPS[self.mlp](dim, int(dim * self.mlp_ratio), approximate)

    def build_norm(self, dim: int, eps: float, affine: bool = True) -> Norm:
        """Return a norm over the last `dim` values, with learnable scales, and biases in LayerNorm, if `affine`."""
        return NORMS[self.norm_type](dim, eps, elementwise_affine=affine)


PUBLISHED = LayerFactory()
