"""Patch states of images, for the visualisation of features: noised under the null label, or clean in encoders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from uvit_decay.image_io import to_float
from uvit_decay.nn.intermediates import HasIntermediates, states_of
from uvit_decay.representations.probing import network_inputs
from uvit_decay.runtime.precision import Precision, computing

if TYPE_CHECKING:  # other rooms are known by their interfaces alone
    from uvit_decay.autoencoder import Autoencoder
    from uvit_decay.diffusion.noise_path import NoisePath
    from uvit_decay.evaluation.image_sources import ImageSource


@dataclass(frozen=True)
class PatchFeatures:
    """Patch features of images in a network; each image has one fixed noise.

    Args:
        net: network, on `device`.
        path: noise path of its input; None for an encoder, which sees clean images.
        images: images of the size that the network, or the autoencoder, takes.
        device: device of the network.
        time: noise level t; 0 for an encoder.
        seed: seed of the noise.
        batch_size: images at a time.
        title: name of the network in titles.
        autoencoder: encoder of the images for a network of latents, which takes the posterior's mean; None for pixels.
        precision: of the network.
    """

    net: HasIntermediates
    path: NoisePath | None
    images: ImageSource
    device: torch.device
    time: float
    seed: int
    batch_size: int
    title: str
    autoencoder: Autoencoder | None = None
    precision: Precision = "float32"

    @property
    def level(self) -> str:
        """The noise level, and the precision unless it is float32, in words for titles."""
        precision = "" if self.precision == "float32" else f", {self.precision}"
        return ("clean images" if self.path is None else f"t = {self.time:g}") + precision

    def states(self, indices: Sequence[int], layers: Sequence[int]) -> Iterator[Float[Tensor, "layers b p d"]]:
        """Yield float32 patch states of these layers (ascending) on the CPU, batchwise; later ones never run."""
        for start in range(0, len(indices), self.batch_size):
            yield self._batch(list(indices[start : start + self.batch_size]), layers)

    @torch.no_grad()
    def _batch(self, part: list[int], layers: Sequence[int]) -> Float[Tensor, "layers b p d"]:
        x = self._input(self.images.read(part))
        inputs = network_inputs(self.path, x, self.time, part, self.seed, "pictures")
        first = self.net.num_prefix_tokens
        with computing(self.device, self.precision):
            states = states_of(self.net, layers, *inputs)
            return torch.stack([state[:, first:].float().cpu() for state in states])

    def _input(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        if self.autoencoder is None:
            return to_float(images.to(self.device, non_blocking=True))
        return self.autoencoder.space.mean(self.autoencoder.encode(images))


def on_grid(values: Tensor, side: int | None = None) -> Tensor:
    """Arrange values (n, p, ...) of p = s s patches, in rows, as (n, s, s, ...).

    With `side`, the grid is enlarged to side x side pixels by nearest neighbours.
    """
    cells = math.isqrt(values.shape[1])
    grid = values.unflatten(1, (cells, cells))
    if side is None:
        return grid
    place = (torch.arange(side) * cells // side).to(grid.device)
    return grid[:, place][:, :, place]
