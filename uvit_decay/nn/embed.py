"""Tokens from pictures and back, and the embedding of time.

b = batch, c = channels, h and w = patches down and across, p = patch size, d = width, n = h * w tokens (row-major).
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.errors import UserError


class PatchEmbed(nn.Module):
    """Non-overlapping patches through one linear map, written as a convolution (the official key layout).

    Raises:
        UserError: the image size is not a multiple of the patch size.
    """

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int) -> None:
        super().__init__()
        if image_size % patch_size:
            raise UserError(f"image_size {image_size} is not divisible by patch_size {patch_size}")
        self.tokens = (image_size // patch_size) ** 2
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b n d"]:
        return rearrange(self.proj(x), "b d h w -> b (h w) d")


def unpatchify(x: Float[Tensor, "b n k"], channels: int) -> Float[Tensor, "b c H W"]:
    """Square pictures from tokens whose k = p * p * c values are ordered (row, column, channel)."""
    side = math.isqrt(x.shape[1])
    patch = math.isqrt(x.shape[2] // channels)
    return rearrange(x, "b (h w) (p q c) -> b c (h p) (w q)", h=side, w=side, p=patch, q=patch)


def timestep_embedding(t: Float[Tensor, " b"], dim: int, max_period: float = 1e4) -> Float[Tensor, "b d"]:
    """Sinusoidal embedding [cos, sin] of t at dim/2 frequencies max_period^(-2i/dim), float32; a last 0 if dim is odd.

    U-ViT feeds it 999 t, so float32 is kept whatever the working dtype: bf16 cannot tell 998 from 999.
    """
    half = dim // 2
    frequencies = torch.exp(-math.log(max_period) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
    angles = t.float()[:, None] * frequencies
    return nn.functional.pad(torch.cat([angles.cos(), angles.sin()], dim=-1), (0, dim % 2))
