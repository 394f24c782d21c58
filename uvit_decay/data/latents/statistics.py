"""Sums over latent cells, stored in every shard, and the statistics of all latents that follow from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import avg_pool2d

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.image_io import to_float


@dataclass(frozen=True)
class Statistics:
    """Per-channel mean and standard deviation of posterior samples x = (z - shift) * scale, without mirror images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Sums:
    """Float64 sums over latent cells, from which mean, standard deviation and the linear map to RGB are computed.

    With x = (z - shift) * scale, z the posterior mean, and y the image averaged over a cell, in [-1, 1]: `gram` is
    (x, 1)^T (x, 1), `cross` is (x, 1)^T y, and `variance` sums the posterior variance of x.
    """

    def __init__(self, space: LatentSpace) -> None:
        rows = space.channels + 1
        self.space = space
        self.gram = torch.zeros(rows, rows, dtype=torch.float64)
        self.cross = torch.zeros(rows, 3, dtype=torch.float64)
        self.variance = torch.zeros(space.channels, dtype=torch.float64)

    def update(self, moments: Tensor, images: Tensor) -> None:
        """Add a batch: moments (b, 2c, h, w) without the mirror images, and uint8 images (b, 3, H, W)."""
        x = rearrange(self.space.mean(moments).double(), "b c h w -> (b h w) c")
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        y = rearrange(avg_pool2d(to_float(images), self.space.factor).double(), "b c h w -> (b h w) c")
        self.gram += x.T @ x
        self.cross += x.T @ y
        log_variance = moments[:, self.space.channels :].double()
        self.variance += self.space.scale**2 * log_variance.exp().sum(dim=(0, 2, 3))

    def to_json(self) -> str:
        """Return the sums as text."""
        return json.dumps({name: getattr(self, name).tolist() for name in ("gram", "cross", "variance")})

    @classmethod
    def from_json(cls, text: str, space: LatentSpace) -> Sums:
        """Return the sums of `to_json`; damaged text raises any error of json and torch, or a ValueError."""
        sums, values = cls(space), json.loads(text)
        for total, name in ((sums.gram, "gram"), (sums.cross, "cross"), (sums.variance, "variance")):
            total += torch.tensor(values[name], dtype=torch.float64).reshape(total.shape)
            if not total.isfinite().all():
                raise ValueError("they are not finite")
        return sums


def statistics(shards: Sequence[Sums]) -> tuple[Statistics, list[list[float]]]:
    """Return the statistics of all latents, and the linear map from (x, 1) to RGB, from the sums of all shards."""
    gram, cross, variance = (
        torch.stack(parts).sum(0)
        for parts in zip(*((sums.gram, sums.cross, sums.variance) for sums in shards), strict=True)
    )
    channels = len(variance)
    cells = gram[channels, channels]
    mean = gram[channels, :channels] / cells
    std = ((gram.diagonal()[:channels] + variance) / cells - mean.square()).sqrt()
    rgb = (torch.linalg.pinv(gram, hermitian=True) @ cross).tolist()
    return Statistics(tuple(mean.tolist()), tuple(std.tolist())), rgb
