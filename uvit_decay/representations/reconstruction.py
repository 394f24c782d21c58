"""Reconstructions of masked images, the paper's Figure 6: the image, what the encoder sees, what the decoder adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from PIL.Image import Image
from torch import Tensor, nn

from uvit_decay.image_io import labelled_grid, to_uint8
from uvit_decay.nn import MAE
from uvit_decay.nn.embed import unpatchify
from uvit_decay.nn.mae import visible_patches
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.random import indices_on, uniform

HEADINGS = ("image", "masked", "reconstruction")
CELL = 96  # pixels: the width of the longest heading


@dataclass(frozen=True)
class Reconstructor:
    """An MAE that reconstructs images behind masks that are functions of the seed and of an image's number.

    The decoder's output is shown at removed patches, the image itself at visible ones. Of an MAE that predicts
    normalised patches, each gets the mean and the variance of the image's own patch: contrast and colour of a patch
    are then not predictions.

    Args:
        net: the masked autoencoder, in eval mode.
        mask_ratio: share of removed patches, in (0, 1).
        seed: seed of the masks.
        precision: of the network.
        decode: conversion of images in the scale of networks to uint8.

    Raises:
        UserError: a network without a decoder, or masks that leave no patch, or remove none.
    """

    net: nn.Module
    mask_ratio: float = 0.75
    seed: int = 0
    precision: Precision = "float32"
    decode: Callable[[Tensor], Tensor] = to_uint8

    def __post_init__(self) -> None:
        if not isinstance(self.net, MAE):
            what = f"{type(self.net).__name__} has no decoder: only a masked autoencoder reconstructs images"
            raise UserError(f"{what} (official files named *_full and mae_visualize_* have one)")
        visible_patches(self.net.patch_embed.tokens, self.mask_ratio)

    @torch.no_grad()
    def __call__(self, x: Float[Tensor, "b c h w"], numbers: Sequence[int]) -> UInt8[Tensor, "b 3 c2 h w"]:
        """Return the image, the masked image (grey where patches are removed) and the reconstruction of each x."""
        rows = indices_on(x.device, numbers)
        noise = uniform("reconstruction", self.seed, rows=rows, shape=(self.net.patch_embed.tokens,))
        with computing(x.device, self.precision):
            prediction, mask = self.net(x, noise, self.mask_ratio)
        removed = unpatchify(mask[..., None].expand(-1, -1, self.net.patch_size**2), channels=1).bool()
        restored = torch.where(removed, self.net.reconstruct(x, prediction.float()), x)
        return torch.stack([self.decode(images) for images in (x, torch.where(removed, 0.0, x), restored)], dim=1)

    def picture(self, read: Callable[[list[int]], Tensor], numbers: Sequence[int], batch_size: int) -> Image:
        """Return the labelled grid of the images `numbers`; `read` gives them (b, c, h, w) in the scale of networks."""
        parts = [list(numbers[start : start + batch_size]) for start in range(0, len(numbers), batch_size)]
        triples = torch.cat([self(read(part), part).cpu() for part in parts])
        abreast = max(1, round(math.sqrt(len(triples) / len(HEADINGS))))  # so that the picture is about square
        return labelled_grid(triples.flatten(0, 1), abreast * len(HEADINGS), HEADINGS * abreast, CELL)
