"""A latent space: the identity of an autoencoder, and the normalisation of its latents.

Networks take x of about unit variance, autoencoders take z:

    x = (z - shift) * scale                        one scaling factor for all channels (Stable Diffusion)
    x = (z - channel_mean) * scale / channel_std   latents_mean and latents_std of a configuration (Playground v2.5)

b = batch, c = latent channels, h and w = latent cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from uvit_decay.pictures import to_uint8
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Positive, Within, check_types

PER_CHANNEL = ("channel_mean", "channel_std")  # fields that are None in most latent spaces
NORMALISATION = ("scale", "shift", *PER_CHANNEL)
SAME = (*NORMALISATION, "channels", "factor", "sha256")  # fields that a network for a latent space depends on


@check_types
@dataclass(frozen=True)
class LatentSpace:
    """Identity of an autoencoder, and the normalisation of its latents z to x (see the module).

    Args:
        vae: hub id or absolute folder of the autoencoder.
        sha256: fingerprint of its weights; empty if it is not known.
        scale: its scaling factor.
        shift: its shift factor.
        channels: c.
        factor: pixels per latent cell, along each side.
        rgb: c + 1 rows of 3 numbers, the last row is the constant: a linear map from x to RGB in [-1, 1].
        channel_mean: mean of each of the c channels of z; None if `shift` applies to all.
        channel_std: standard deviation of each of the c channels of z; None for 1.
    """

    vae: str
    sha256: str
    scale: Annotated[float, Within("(0, inf)")]
    shift: Annotated[float, Within("(-inf, inf)")]
    channels: Positive
    factor: Positive
    rgb: Sequence[Sequence[float]] | None = None
    channel_mean: tuple[float, ...] | None = None
    channel_std: tuple[float, ...] | None = None

    @property
    def scales(self) -> Tensor:
        """Factor of each channel from z to x, float64 (c,)."""
        std = self.channel_std
        if std is None:
            std = (1.0,) * self.channels
        return self.scale / torch.tensor(std, dtype=torch.float64)

    def normalise(self, z: Tensor) -> Tensor:
        """Return x (b, c, h, w) for z."""
        mean, std = self._per_channel(z)
        return (z - mean) * self.scale / std

    def denormalise(self, x: Tensor) -> Tensor:
        """Return z (b, c, h, w) for x."""
        mean, std = self._per_channel(x)
        return x / self.scale * std + mean

    def _per_channel(self, like: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return mean and standard deviation of z as numbers or as tensors (c, 1, 1) on the device of `like`."""

        def to_tensor(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=like.device, dtype=like.dtype)[:, None, None]

        mean: Tensor | float = self.shift
        std: Tensor | float = 1.0
        if self.channel_mean is not None:
            mean = to_tensor(self.channel_mean)
        if self.channel_std is not None:
            std = to_tensor(self.channel_std)
        return mean, std

    def mean(self, moments: Tensor) -> Tensor:
        """Return the normalised posterior mean, float32 (b, c, h, w), for moments (b, 2c, h, w)."""
        mean = moments[:, : self.channels].float()
        return self.normalise(mean)

    def sample(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Return a normalised sample of the posterior N(mean, exp(log-variance)), float32 (b, c, h, w).

        `moments` (b, 2c, h, w) are mean and log-variance, `noise` is float32 (b, c, h, w), standard normal.
        """
        mean, log_variance = moments.float().chunk(2, dim=1)
        deviation = torch.exp(0.5 * log_variance)
        return self.normalise(torch.addcmul(mean, deviation, noise))

    def preview(self, x: Tensor) -> Tensor:
        """Return rough images without decoding: uint8 (b, 3, h, w), one pixel per latent cell, for x (b, c, h, w)."""
        if self.rgb is None:
            raise UserError(f"{self.vae}: its latents have no linear map to RGB; encode images to fit one")
        rows = torch.tensor(self.rgb, device=x.device)
        weights = rows[:-1]
        constant = rows[-1][:, None, None]
        rgb = torch.einsum("bchw,cr->brhw", x.float(), weights) + constant
        return to_uint8(rgb)

    def check_same(self, other: LatentSpace, ours: str, theirs: str, keys: Sequence[str] = SAME) -> None:
        """Raise a UserError with both values if a network for one latent space cannot work on the other.

        Args:
            other: the other latent space.
            ours: owner of this latent space in the message, such as "the checkpoint".
            theirs: owner of the other one.
            keys: fields that must be equal; an empty string is equal to all values.
        """
        for key in keys:
            mine, yours = getattr(self, key), getattr(other, key)
            if mine != yours and "" not in (mine, yours):
                raise UserError(
                    f"{ours} and {theirs} have different latents: {key} {mine} ({self.vae}) and {yours} ({other.vae}); "
                    "use one autoencoder for both"
                )
