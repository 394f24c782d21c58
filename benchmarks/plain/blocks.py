"""Attention, MLP and the pre-norm blocks of U-ViT and MAE, with a separate scale and add of each shortcut."""

from __future__ import annotations

import math

import einops
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head self-attention; U-ViT's code casts q, k and v to float32, timm's does not."""

    def __init__(self, dim: int, heads: int, qkv_bias: bool, float32: bool) -> None:
        super().__init__()
        self.heads, self.float32 = heads, float32
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = einops.rearrange(self.qkv(x), "B L (K H D) -> K B H L D", K=3, H=self.heads)
        if self.float32:
            qkv = qkv.float()
        q, k, v = qkv[0], qkv[1], qkv[2]
        x = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(einops.rearrange(x, "B H L D -> B L (H D)"))


class Mlp(nn.Module):
    def __init__(self, dim: int, approximate: str = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU(approximate)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """x <- alpha x + f(x), for attention and MLP."""

    def __init__(self, dim: int, heads: int, skip: bool = False, mae: bool = False) -> None:
        super().__init__()
        eps = 1e-6 if mae else 1e-5
        self.norm1 = nn.LayerNorm(dim, eps)
        self.attn = Attention(dim, heads, qkv_bias=mae, float32=not mae)
        self.norm2 = nn.LayerNorm(dim, eps)
        self.mlp = Mlp(dim)
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None

    def forward(self, x: Tensor, alpha: tuple[float, float] = (1.0, 1.0), skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = alpha[0] * x + self.attn(self.norm1(x))
        return alpha[1] * x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, patch: int, channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return einops.rearrange(self.proj(x), "B C H W -> B (H W) C")


def alphas(depth: int, alpha_min: float) -> list[tuple[float, float]]:
    """Return the weights of a block's two shortcuts: a line from 1 to alpha_min over 2 depth branches."""
    values = np.linspace(1, alpha_min, 2 * depth).tolist()
    return list(zip(values[::2], values[1::2], strict=True))


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    half = dim // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half).to(t.device)
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


def unpatchify(x: Tensor, channels: int) -> Tensor:
    patch = int((x.shape[2] // channels) ** 0.5)
    side = int(x.shape[1] ** 0.5)
    return einops.rearrange(x, "B (h w) (p q C) -> B C (h p) (w q)", h=side, w=side, p=patch, q=patch)
