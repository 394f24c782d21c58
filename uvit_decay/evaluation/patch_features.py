"""Token states of pictures, as pictures of features want them: noised, under the null label, patches only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from uvit_decay.autoencoder import Autoencoder, decoder
from uvit_decay.checkpoint import Checkpoint
from uvit_decay.diffusion.path import Path
from uvit_decay.errors import UserError
from uvit_decay.evaluation.pictures import Pictures
from uvit_decay.evaluation.probing import noised
from uvit_decay.evaluation.sources import open_pictures
from uvit_decay.image import to_float
from uvit_decay.nn.tap import Tapped


@dataclass(frozen=True)
class PatchFeatures:
    """What a network sees in pictures; each has one fixed noise.

    Args:
        net: on `device`.
        path: that noises its input.
        pictures: of the size that the network takes.
        device: where it works.
        time: noise level t.
        seed: of the noise.
        batch_size: pictures at a time.
        autoencoder: that encodes them, for a network of latents; the posterior's mean is taken.
    """

    net: Tapped
    path: Path
    pictures: Pictures
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
        """The pictures that `name` stands for (`open_pictures`), as the network of a checkpoint sees them.

        Raises:
            UserError: a network without stages or null label, pictures that are not there or of another size, `vae`
                for a network of pixels, or an autoencoder that does not fit.
        """
        net = found.net
        if not isinstance(net, Tapped):
            raise UserError(f"{type(net).__name__} has no stages to look at")
        if net.num_classes and not net.null_label:
            raise UserError("features are read under the null label, which this network was trained without")
        if vae is not None and found.latents is None:
            raise UserError("--vae: this checkpoint sees pixels, there is nothing to encode")
        autoencoder = decoder(found.latents, vae, device) if found.latents else None
        side = net.image_size * (autoencoder.space.factor if autoencoder else 1)
        channels = 3 if autoencoder else net.channels
        pictures = open_pictures(name, channels, side)
        if pictures.shape != (channels, side, side):
            c, h, w = pictures.shape
            raise UserError(f"{name} has {w}x{h}x{c}, the network takes {side}x{side}x{channels}")
        return cls(net.to(device), found.path, pictures, device, time, seed, batch_size, autoencoder)

    def states(self, indices: Sequence[int], places: Sequence[int]) -> Iterator[Float[Tensor, "layers b p d"]]:
        """Float32 patch states on the CPU of the stages `places`, ascending, batch by batch; later ones never run."""
        for start in range(0, len(indices), self.batch_size):
            yield self._batch(list(indices[start : start + self.batch_size]), places)

    @torch.no_grad()
    def _batch(self, part: list[int], places: Sequence[int]) -> Float[Tensor, "layers b p d"]:
        x = self._input(self.pictures.read(part))
        trunk = self.net.trunk(*noised(self.path, x, self.time, part, self.seed, "pictures"))
        wanted = zip(range(places[-1] + 1), trunk, strict=False)
        return torch.stack([state[:, self.net.extras :].float().cpu() for i, state in wanted if i in places])

    def _input(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        if self.autoencoder is None:
            return to_float(images.to(self.device))
        return self.autoencoder.space.mean(self.autoencoder.encode(images))


def on_grid(values: Tensor, side: int | None = None) -> Tensor:
    """(n, s, s, ...) of values (n, p, ...) of p = s s patches, row by row; enlarged to `side` pixels, nearest ones."""
    cells = math.isqrt(values.shape[1])
    grid = values.unflatten(1, (cells, cells))
    if side is None:
        return grid
    place = (torch.arange(side) * cells // side).to(grid.device)
    return grid[:, place][:, :, place]
