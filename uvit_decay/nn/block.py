"""The pre-norm transformer block with decayed shortcuts, with the official U-ViT's names and shapes.

b = batch, n = tokens, d = width.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from uvit_decay.decay import decayed_add
from uvit_decay.errors import UserError

Tokens = Float[Tensor, "b n d"]


class Attention(nn.Module):
    """Multi-head self-attention; the rows of `qkv` are ordered [q; k; v], each (head, channel).

    Raises:
        UserError: the width is not a multiple of the number of heads.
    """

    def __init__(self, dim: int, heads: int, qkv_bias: bool = False) -> None:
        super().__init__()
        if dim % heads:
            raise UserError(f"dim {dim} is not divisible by heads {heads}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tokens) -> Tokens:
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        return self.proj(rearrange(scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class Mlp(nn.Module):
    """Two linear layers around an exact (erf) GELU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tokens) -> Tokens:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP branches on decayed shortcuts; an output block first merges a long skip by concatenation.

    The weights of the shortcuts come with the call, since the network knows the depth of each block.
    """

    def __init__(
        self, dim: int, heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False, skip: bool = False
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, qkv_bias)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None

    def forward(
        self,
        x: Tokens,
        skip: Tokens | None,
        alphas: tuple[float | Tensor, float | Tensor],
        betas: tuple[float, float] = (1.0, 1.0),
    ) -> Tokens:
        """x <- alpha x + beta f(x), twice. `skip` is given if and only if the block was built with skip=True."""
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = decayed_add(x, self.attn(self.norm1(x)), alphas[0], betas[0])
        return decayed_add(x, self.mlp(self.norm2(x)), alphas[1], betas[1])

    def zero_init(self) -> None:
        """Zero the last linear of both branches: they start silent, which keeps small alpha_min stable (Sec. 3)."""
        for linear in (self.attn.proj, self.mlp.fc2):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
