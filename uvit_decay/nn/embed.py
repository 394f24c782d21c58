"""Patches of images and their embedding, embeddings of time, label and position, and the scale of pixel values.

b = batch, c = channels, h and w = patches down and across, p = patch size, d = width, n = h * w tokens (row-major).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from uvit_decay.runtime.constants import IMAGENET_MEAN, IMAGENET_STD
from uvit_decay.runtime.precision import without_autocast
from uvit_decay.terminal.errors import UserError

Pixels = Literal["imagenet", "unit"]


class PatchEmbed(nn.Module):
    """Linear embedding of non-overlapping patches, written as a convolution (the official key layout).

    It computes in the dtype of its weights, also under autocast.
    """

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int) -> None:
        super().__init__()
        if image_size % patch_size:
            raise UserError(f"image_size {image_size} is not divisible by patch_size {patch_size}")
        self.tokens = (image_size // patch_size) ** 2
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b n d"]:
        with without_autocast(x):
            return self.proj(x).flatten(2).transpose(1, 2)


def patchify(x: Float[Tensor, "b c H W"], patch: int) -> Float[Tensor, "b n k"]:
    """Return the patches of images as tokens of k = p * p * c values, ordered (row, column, channel)."""
    split = x.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # b c h p w q
    patches = split.permute(0, 2, 4, 3, 5, 1)  # b h w p q c
    return patches.flatten(3).flatten(1, 2)


def unpatchify(x: Float[Tensor, "b n k"], channels: int) -> Float[Tensor, "b c H W"]:
    """Return square images from tokens whose k = p * p * c values are ordered (row, column, channel)."""
    side = math.isqrt(x.shape[1])
    patch = math.isqrt(x.shape[2] // channels)
    split = x.unflatten(2, (patch, patch, channels)).unflatten(1, (side, side))  # b h w p q c
    pixels = split.permute(0, 5, 1, 3, 2, 4)  # b c h p w q
    return pixels.flatten(4).flatten(2, 3)


def timestep_embedding(t: Float[Tensor, " b"], dim: int) -> Float[Tensor, "b d"]:
    """Return the sinusoidal embedding [cos, sin] of t at dim/2 frequencies 10000^(-2i/dim), float32.

    An odd dim is padded with one 0. The dtype is always float32, because U-ViT embeds 999 t, and bfloat16 rounds 998
    and 999 to one number.
    """
    half = dim // 2
    steps = torch.arange(half, device=t.device, dtype=torch.float32)
    frequencies = torch.exp(-math.log(1e4) * steps / half)
    angles = t.float()[:, None] * frequencies
    waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return nn.functional.pad(waves, (0, dim % 2))


class TimestepEmbedder(nn.Module):
    """Sinusoidal embedding of t with 256 values, then an MLP to width d; float32 also under autocast."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
        # bfloat16 rounds neighbouring times to one number, and the MLP is too small for its speed to matter.
        with without_autocast(t):
            first = self.mlp[0]
            waves = timestep_embedding(t, first.in_features)
            return self.mlp(waves.to(first.weight.dtype))


class LabelEmbedder(nn.Module):
    """Table of `rows` learned vectors, one for each label."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(rows, dim)

    def forward(self, y: Int[Tensor, " b"]) -> Float[Tensor, "b d"]:
        return self.embedding_table(y)


def sincos_positions(side: int, dim: int) -> Float[Tensor, "n d"]:
    """Return fixed embeddings of side * side positions, float32: [sin, cos] of the column, then [sin, cos] of the row.

    Each of the four parts has dim/4 frequencies 10000^(-4i/dim) (DiT and MAE).
    """
    if dim % 4:
        raise UserError(f"dim {dim} is not divisible by 4, one part each for sine and cosine of row and column")
    quarter = dim // 4
    frequencies = 1e4 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1).float()
    of_columns = waves.repeat(side, 1)
    of_rows = waves.repeat_interleave(side, dim=0)
    return torch.cat([of_columns, of_rows], dim=-1)


def resize_positions(positions: Float[Tensor, "1 n d"], prefix: int, side: int) -> Float[Tensor, "1 _ d"]:
    """Return the embeddings of a square grid of positions, interpolated bicubically to side * side positions (MAE).

    The first `prefix` tokens, such as the class token, are not changed.
    """
    before = math.isqrt(positions.shape[1] - prefix)
    if before == side:
        return positions
    grid = positions[:, prefix:].transpose(1, 2).unflatten(2, (before, before))
    grid = nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    patches = grid.flatten(2).transpose(1, 2)
    return torch.cat([positions[:, :prefix], patches], dim=1)


@dataclass(frozen=True)
class PixelScale:
    """Scale of a network's pixel values: (value - mean) / std for values in [0, 1], with numbers for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, pixels: Pixels, channels: int) -> PixelScale:
        """Return the scale called `pixels`: ImageNet's mean and standard deviation, or [-1, 1] for any channels."""
        if pixels == "unit":
            return cls((0.5,) * channels, (0.5,) * channels)
        if channels != 3:
            raise UserError(
                f"pixels imagenet is a scale of 3 channels, the network has {channels}; set `pixels` to unit"
            )
        return cls(IMAGENET_MEAN, IMAGENET_STD)

    def normalise(self, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b c H W"]:
        """Return images of [-1, 1] in this scale."""
        factors = []
        for mean, std in zip(self.mean, self.std, strict=True):
            factors.append((0.5 / std, (0.5 - mean) / std))
        return self._map(x, factors)

    def denormalise(self, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b c H W"]:
        """Return images of this scale in [-1, 1], the inverse of `normalise`."""
        factors = []
        for mean, std in zip(self.mean, self.std, strict=True):
            factors.append((2.0 * std, 2.0 * mean - 1.0))
        return self._map(x, factors)

    def _map(self, x: Tensor, factors: list[tuple[float, float]]) -> Tensor:
        """Return a x + b with numbers (a, b) for each channel, which are not copied to the device."""
        if len(set(factors)) > 1:
            channels = [a * x[:, c] + b for c, (a, b) in enumerate(factors)]
            return torch.stack(channels, dim=1)
        a, b = factors[0]
        if a == 1.0 and b == 0.0:
            return x
        return a * x + b
