"""Reconstructions of masked images, the paper's Figure 6: the image, the masked image, the reconstruction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, UInt8
from PIL.Image import Image
from torch import Tensor, nn

from uvit_decay.nn import MAE
from uvit_decay.nn.embed import unpatchify
from uvit_decay.nn.mae import visible_patches
from uvit_decay.pictures import labelled_grid, to_uint8
from uvit_decay.runtime.precision import Precision, computing
from uvit_decay.runtime.random import indices_on, uniform
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Seed, Within, check_types

HEADINGS = ("image", "masked", "reconstruction")
CELL = 96  # pixels: the width of the longest heading


@check_types
@dataclass(frozen=True)
class Reconstructor:
    """An MAE that reconstructs masked images. A mask is a function of the seed and the image's number.

    A reconstruction shows the decoder's output at removed patches and the image itself at visible ones. If the MAE
    predicts normalised patches, each predicted patch gets the mean and the variance of the image's own patch: its
    contrast and colour are then not predictions.

    Args:
        net: the masked autoencoder, in eval mode.
        mask_ratio: share of removed patches, in (0, 1).
        seed: seed of the masks.
        precision: precision of the network.
        decode: function that converts images in the scale of the network to uint8.
    """

    net: nn.Module
    mask_ratio: Annotated[float, Within("(0, 1)")] = 0.75
    seed: Seed = 0
    precision: Precision = "float32"
    decode: Callable[[Tensor], Tensor] = to_uint8

    def __post_init__(self) -> None:
        if not isinstance(self.net, MAE):
            network = type(self.net).__name__
            hint = "give a masked autoencoder (official files with a decoder are named *_full and mae_visualize_*)"
            raise UserError(f"cannot reconstruct images, {network} has no decoder: {hint}")
        visible_patches(self.net.patch_embed.tokens, self.mask_ratio)

    @torch.no_grad()
    def __call__(self, x: Float[Tensor, "b c h w"], numbers: Sequence[int]) -> UInt8[Tensor, "b 3 c2 h w"]:
        """Return the image, the masked image and the reconstruction of each x.

        Args:
            x: images in the scale of the network.
            numbers: numbers of the images, which determine their masks.
        """
        rows = indices_on(x.device, numbers)
        noise = uniform("reconstruction", self.seed, rows=rows, shape=(self.net.patch_embed.tokens,))
        with computing(x.device, self.precision):
            prediction, mask = self.net(x, noise, self.mask_ratio)
        pixels = mask[..., None].expand(-1, -1, self.net.patch_size**2)
        removed = unpatchify(pixels, channels=1).bool()
        masked = torch.where(removed, 0.0, x)  # grey
        restored = torch.where(removed, self.net.reconstruct(x, prediction.float()), x)
        return torch.stack([self.decode(x), self.decode(masked), self.decode(restored)], dim=1)

    def picture(self, read: Callable[[list[int]], Tensor], numbers: Sequence[int], batch_size: int) -> Image:
        """Return the labelled grid of images.

        Args:
            read: function of numbers of images that returns them, (b, c, h, w) in the scale of the network.
            numbers: numbers of the images.
            batch_size: images at a time.
        """
        parts = []
        for start in range(0, len(numbers), batch_size):
            part = list(numbers[start : start + batch_size])
            parts.append(self(read(part), part).cpu())
        triples = torch.cat(parts)
        width = len(HEADINGS)
        abreast = max(1, round(math.sqrt(len(triples) / width)))  # makes the picture about square
        return labelled_grid(triples.flatten(0, 1), abreast * width, HEADINGS * abreast, CELL)
