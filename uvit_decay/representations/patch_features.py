"""Patch states of noised images under the null label, for the visualisation of features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from uvit_decay.autoencoder import Autoencoder, decoder
from uvit_decay.checkpoint import Checkpoint
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.image_io import to_float
from uvit_decay.nn.intermediates import HasIntermediates
from uvit_decay.representations.probing import add_noise
from uvit_decay.runtime.errors import UserError


@dataclass(frozen=True)
class PatchFeatures:
    """Patch features of images in a network; each image has one fixed noise.

    Args:
        net: network, on `device`.
        path: noise path of its input.
        images: images of the size that the network, or the autoencoder, takes.
        device: device of the network.
        time: noise level t.
        seed: seed of the noise.
        batch_size: images at a time.
        autoencoder: encoder of the images for a network of latents, which takes the posterior's mean; None for pixels.
    """

    net: HasIntermediates
    path: NoisePath
    images: ImageSource
    device: torch.device
    time: float
    seed: int
    batch_size: int
    autoencoder: Autoencoder | None = None

    @classmethod
    def of(
        cls,
        found: Checkpoint,
        name: str,
        device: torch.device,
        time: float,
        seed: int,
        batch_size: int,
        vae: str | None,
    ) -> PatchFeatures:
        """Open the images named `name` (see `open_images`) for the network of the checkpoint `found`.

        Raises:
            UserError: a network without layers or null label, images that are missing or of another size, `vae` for a
                network of pixels, or an autoencoder that does not fit.
        """
        net = found.net
        if not isinstance(net, HasIntermediates):
            raise UserError(f"{type(net).__name__} has no layers to look at")
        if net.num_classes and not net.null_label:
            raise UserError("features are read under the null label, which this network was trained without")
        if vae is not None and found.latents is None:
            raise UserError("--vae: this checkpoint sees pixels, there is nothing to encode")
        autoencoder = decoder(found.latents, vae, device) if found.latents else None
        side = net.image_size * (autoencoder.space.factor if autoencoder else 1)
        channels = 3 if autoencoder else net.channels
        images = open_images(name, channels, side)
        if images.shape != (channels, side, side):
            c, h, w = images.shape
            raise UserError(f"{name} has {w}x{h}x{c}, the network takes {side}x{side}x{channels}")
        return cls(net.to(device), found.path, images, device, time, seed, batch_size, autoencoder)

    def states(self, indices: Sequence[int], places: Sequence[int]) -> Iterator[Float[Tensor, "layers b p d"]]:
        """Yield float32 patch states of the layers `places` (ascending) on the CPU, batchwise; later ones never run."""
        for start in range(0, len(indices), self.batch_size):
            yield self._batch(list(indices[start : start + self.batch_size]), places)

    @torch.no_grad()
    def _batch(self, part: list[int], places: Sequence[int]) -> Float[Tensor, "layers b p d"]:
        x = self._input(self.images.read(part))
        states = self.net.forward_intermediates(*add_noise(self.path, x, self.time, part, self.seed, "pictures"))
        wanted = zip(range(places[-1] + 1), states, strict=False)
        return torch.stack([state[:, self.net.num_prefix_tokens :].float().cpu() for i, state in wanted if i in places])

    def _input(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        if self.autoencoder is None:
            return to_float(images.to(self.device))
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
