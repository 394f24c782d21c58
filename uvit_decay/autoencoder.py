"""Conversion between images and latents: the autoencoder, and the normalisation of its latents.

Networks take x = (z - shift) * scale, of about unit variance; autoencoders take z. diffusers' encode and decode never
apply the scaling factor of their configuration: only `LatentSpace` applies it, in both directions.
b = batch, c = latent channels, h and w = latent cells, H and W = pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from uvit_decay.image_io import to_float, to_uint8
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.tensor_files import digest

SLICE_PIXELS = 8 * 256**2  # decoded in one slice: about 5 GB for Stable Diffusion's decoder in float32
NO_VARIANCE = -30.0  # log-variance for encoders without one: the lower bound to which AutoencoderKL clamps

SAME = ("scale", "shift", "channels", "factor", "sha256")  # what networks for one latent space depend on


@dataclass(frozen=True)
class LatentSpace:
    """The autoencoder's identity and the normalisation x = (z - shift) * scale of its latents z.

    Args:
        vae: hub id or absolute folder of the autoencoder.
        sha256: fingerprint of its weights; empty if they are not known.
        scale: its scaling factor.
        shift: its shift factor.
        channels: c.
        factor: pixels per latent cell, along each side.
        rgb: c + 1 rows (the last one is the constant) of 3 numbers: a linear map from x to RGB in [-1, 1].
    """

    vae: str
    sha256: str
    scale: float
    shift: float
    channels: int
    factor: int
    rgb: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        if not (0 < self.scale < math.inf and math.isfinite(self.shift) and min(self.channels, self.factor) >= 1):
            raise UserError(f"a latent space has positive scale, channels and factor and a finite shift, got {self}")
        rows = [] if self.rgb is None else [len(row) for row in self.rgb]
        if self.rgb is not None and (len(rows) != self.channels + 1 or {*rows} != {3}):
            raise UserError(f"the map to RGB of {self.channels} latent channels has {self.channels + 1} rows of 3")

    def scaled(self, z: Tensor) -> Tensor:
        """Return x of z."""
        return (z - self.shift) * self.scale

    def unscaled(self, x: Tensor) -> Tensor:
        """Return z of x."""
        return x / self.scale + self.shift

    def mean(self, moments: Tensor) -> Tensor:
        """Return the normalised posterior mean: float32 (b, c, h, w) of moments (b, 2c, h, w)."""
        return self.scaled(moments[:, : self.channels].float())

    def sample(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Return a normalised sample of the posterior N(mean, exp(log-variance)), float32 (b, c, h, w).

        `moments` (b, 2c, h, w) are mean and log-variance, `noise` is float32 (b, c, h, w), standard normal.
        """
        mean, log_variance = moments.float().chunk(2, dim=1)
        return self.scaled(torch.addcmul(mean, torch.exp(0.5 * log_variance), noise))

    def preview(self, x: Tensor) -> Tensor:
        """Return rough images without decoding: uint8 (b, 3, h, w), one pixel per latent cell, of x (b, c, h, w)."""
        if self.rgb is None:
            raise UserError(f"the latents of {self.vae} have no linear map to RGB: encode images to fit one")
        weights = torch.tensor(self.rgb, device=x.device)
        rgb = torch.einsum("bchw,cr->brhw", x.float(), weights[:-1]) + weights[-1][:, None, None]
        return to_uint8(rgb)

    def check_same(self, other: LatentSpace, ours: str, theirs: str, keys: Sequence[str] = SAME) -> None:
        """Raise a UserError with both values if a network for one latent space cannot work on the other."""
        for key in keys:
            mine, yours = getattr(self, key), getattr(other, key)
            if mine != yours and "" not in (mine, yours):
                raise UserError(f"{ours} has latents with {key} {mine} ({self.vae}), {theirs} {yours} ({other.vae})")


class Autoencoder:
    """diffusers' AutoencoderKL or AutoencoderTiny from the hub or from a folder; frozen.

    Args:
        vae: hub id, or folder written by `save_pretrained`.
        device: device of the weights.
        dtype: float32 or bfloat16; float16 overflows in Stable Diffusion's decoder.

    Raises:
        UserError: it does not exist and cannot be fetched, is incomplete, or is another kind of model.
    """

    def __init__(self, vae: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        net = _load(vae)
        config = net.config
        self.is_tiny = type(net).__name__ == "AutoencoderTiny"
        with explained(f"the configuration of the autoencoder {vae}", TypeError, ValueError):
            self.space = LatentSpace(
                str(Path(vae).resolve()) if Path(vae).is_dir() else vae,
                digest(net.state_dict()),
                float(config.scaling_factor),
                float(config.get("shift_factor") or 0.0) if not self.is_tiny else 0.0,
                config.latent_channels,
                2 ** (len(config.get("block_out_channels") or config.encoder_block_out_channels) - 1),
            )
        self.dtype = dtype
        # Twice as fast with channels last in bfloat16 on CPUs; float32 gains 5 % and keeps the same bytes.
        layout = torch.channels_last if dtype == torch.bfloat16 else torch.preserve_format
        net = nn.Module.to(net, device, dtype, memory_format=layout)  # ModelMixin.to advises against it
        self.net = net.eval().requires_grad_(False)

    def on(self, device: torch.device | str) -> Autoencoder:
        """Return a copy on `device`; its memory is freed with the last reference to the copy."""
        other = copy(self)
        other.net = nn.Module.to(deepcopy(self.net), device)
        return other

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Return float32 moments (b, 2c, h, w), mean and log-variance, of uint8 images (b, 3, H, W)."""
        x = to_float(images.to(self.net.device, non_blocking=True)).to(self.dtype)
        if self.is_tiny:
            mean = self.net.encode(x).latents.float()
            return torch.cat([mean, torch.full_like(mean, NO_VARIANCE)], dim=1)
        posterior = self.net.encode(x).latent_dist
        return torch.cat([posterior.mean.float(), posterior.logvar.float()], dim=1)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """Decode normalised latents x (b, c, h, w) to uint8 images (b, 3, H, W), in slices that fit into memory."""
        images = decoded(self.net, self.space, x.to(self.net.device), self.dtype)
        return torch.cat([to_uint8(image) for image in images])


def decoded(net: nn.Module, space: LatentSpace, x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the images of normalised latents x (b, c, h, w), in slices that fit into memory.

    Args:
        net: diffusers' autoencoder, on the device of x.
        space: its latent space.
        x: states of a network.
        dtype: of the weights of the autoencoder.

    Returns:
        images (slice, 3, H, W) of about [-1, 1], in `dtype`.
    """
    pixels = x.shape[-1] * x.shape[-2] * space.factor**2
    for z in space.unscaled(x).to(dtype).split(max(1, SLICE_PIXELS // pixels)):
        yield net.decode(z).sample


def decoder(space: LatentSpace | None, vae: str | None, device: torch.device | str) -> Autoencoder | None:
    """Return the autoencoder of these latents: the one that encoded them, or `vae` if it is given; None for pixels.

    Raises:
        UserError: `vae` has another latent space, the weights of the encoder have changed, or it is given for pixels.
    """
    if space is None:
        if vae is not None:
            raise UserError("--vae: the network of this checkpoint is one of pixels, leave it out")
        return None
    autoencoder = Autoencoder(vae or space.vae, device)
    if vae is None and space.sha256 not in ("", autoencoder.space.sha256):
        raise UserError(f"the weights of {space.vae} are not those of the latents: --vae {space.vae} uses them")
    # AutoencoderTiny decodes x itself, whatever the scale of the AutoencoderKL that it imitates.
    keys = ("channels", "factor") if autoencoder.is_tiny else ("channels", "factor", "scale", "shift")
    space.check_same(autoencoder.space, "the checkpoint", "--vae" if vae else "its autoencoder now", keys)
    return autoencoder


def _load(vae: str) -> nn.Module:
    """Load an AutoencoderKL or AutoencoderTiny; raise a UserError if it is missing, incomplete or not supported."""
    from diffusers import AutoencoderKL, AutoencoderTiny

    kinds = {kind.__name__: kind for kind in (AutoencoderKL, AutoencoderTiny)}
    hint = "name a folder of diffusers' with --vae, or fetch it where there is a network"
    # Any error is explained: a damaged configuration can make diffusers raise anything.
    with explained(f"the autoencoder {vae} cannot be loaded", Exception, hint=hint):
        config = AutoencoderKL.load_config(vae)
        kind = kinds.get(config.get("_class_name"))
        if kind is None:
            raise UserError(f"{vae} is a {config.get('_class_name')}, not one of {', '.join(kinds)}")
        net, info = kind.from_pretrained(vae, output_loading_info=True)
    if config.get("latents_mean") or config.get("latents_std"):
        raise UserError(f"the autoencoder {vae} has a mean and deviation for each channel, which is not supported")
    missing = [*info["missing_keys"], *info["mismatched_keys"]]
    if missing:
        raise UserError(f"the autoencoder {vae} lacks {len(missing)} of its weights, the first is {missing[0]}")
    for file in Path(vae).glob("*.safetensors"):  # diffusers casts what is quantised, without its scale
        with safe_open(file, "pt") as stored:
            kinds = {stored.get_slice(name).get_dtype() for name in stored.keys()} - {"F16", "BF16", "F32", "F64"}  # noqa: SIM118
        if kinds:
            raise UserError(f"{file} has weights of the type {min(kinds)}: they must be floating-point")
    return net
