"""Conversion between images and latents: the autoencoder, and the normalisation of its latents.

Networks take x of about unit variance, autoencoders take z:

    x = (z - shift) * scale                        one scaling factor for all channels (Stable Diffusion)
    x = (z - channel_mean) * scale / channel_std   latents_mean and latents_std of a configuration (Playground v2.5)

diffusers' encode and decode never apply these numbers of their configuration: only `LatentSpace` applies them, in both
directions.
b = batch, c = latent channels, h and w = latent cells, H and W = pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from uvit_decay.image_io import to_float, to_uint8
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.tensor_files import digest

SLICE_PIXELS = 8 * 256**2  # decoded in one slice: about 5 GB for Stable Diffusion's decoder in float32
NO_VARIANCE = -30.0  # log-variance for encoders without one: the lower bound to which AutoencoderKL clamps

PER_CHANNEL = ("channel_mean", "channel_std")  # fields of a LatentSpace that most have not
NORMALISATION = ("scale", "shift", *PER_CHANNEL)
SAME = (*NORMALISATION, "channels", "factor", "sha256")  # what networks for one latent space depend on
CONFIG = "config.json"  # of an autoencoder
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LEAST_SIDE = 64  # pixels of the image that is encoded as a trial


@dataclass(frozen=True)
class LatentSpace:
    """The autoencoder's identity and the normalisation of its latents z to x, see above.

    Args:
        vae: hub id or absolute folder of the autoencoder.
        sha256: fingerprint of its weights; empty if they are not known.
        scale: its scaling factor.
        shift: its shift factor.
        channels: c.
        factor: pixels per latent cell, along each side.
        rgb: c + 1 rows (the last one is the constant) of 3 numbers: a linear map from x to RGB in [-1, 1].
        channel_mean: mean of each of the c channels of z; None if `shift` applies to all.
        channel_std: standard deviation of each of the c channels of z; None for 1.
    """

    vae: str
    sha256: str
    scale: float
    shift: float
    channels: int
    factor: int
    rgb: Sequence[Sequence[float]] | None = None
    channel_mean: Sequence[float] | None = None
    channel_std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not (0 < self.scale < math.inf and math.isfinite(self.shift) and min(self.channels, self.factor) >= 1):
            raise UserError(f"a latent space has positive scale, channels and factor and a finite shift, got {self}")
        rows = [] if self.rgb is None else [len(row) for row in self.rgb]
        if self.rgb is not None and (len(rows) != self.channels + 1 or {*rows} != {3}):
            raise UserError(f"the map to RGB of {self.channels} latent channels has {self.channels + 1} rows of 3")
        for name in PER_CHANNEL:
            self._check_per_channel(name)
        if self.channel_mean is not None and self.shift != 0.0:
            raise UserError(f"a latent space has a shift or a mean for each channel, got both: {self}")

    def _check_per_channel(self, name: str) -> None:
        """Raise a UserError unless a field has c finite numbers, positive for `channel_std`, or is None."""
        values = getattr(self, name)
        if values is None:
            return
        object.__setattr__(self, name, tuple(values))  # JSON has lists, which are not equal to tuples
        fits = len(values) == self.channels and all(math.isfinite(value) for value in values)
        if not fits or (name == "channel_std" and min(values) <= 0):
            raise UserError(f"{self.vae}: {name} must have {self.channels} finite numbers, one a channel, got {values}")

    @property
    def scales(self) -> Tensor:
        """Factor of each channel from z to x, float64 (c,)."""
        std = (1.0,) * self.channels if self.channel_std is None else self.channel_std
        return self.scale / torch.tensor(std, dtype=torch.float64)

    def scaled(self, z: Tensor) -> Tensor:
        """Return x (b, c, h, w) of z."""
        mean, std = self._per_channel(z)
        return (z - mean) * self.scale / std

    def unscaled(self, x: Tensor) -> Tensor:
        """Return z (b, c, h, w) of x."""
        mean, std = self._per_channel(x)
        return x / self.scale * std + mean

    def _per_channel(self, like: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return mean and standard deviation of z as numbers or as tensors (c, 1, 1) on the device of `like`."""
        mean: Tensor | float = self.shift
        std: Tensor | float = 1.0
        if self.channel_mean is not None:
            mean = torch.tensor(self.channel_mean, device=like.device, dtype=like.dtype)[:, None, None]
        if self.channel_std is not None:
            std = torch.tensor(self.channel_std, device=like.device, dtype=like.dtype)[:, None, None]
        return mean, std

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
    """An autoencoder of diffusers from the hub or from a folder; frozen.

    Any class of diffusers that encodes and decodes images (b, 3, H, W): AutoencoderKL, AutoencoderDC, AutoencoderTiny.

    Args:
        vae: hub id, or folder written by `save_pretrained`.
        device: device of the weights.
        dtype: float32 or bfloat16; float16 overflows in Stable Diffusion's decoder.

    Raises:
        UserError: it does not exist and cannot be fetched, is incomplete, is another kind of model, or cannot encode
            and decode an image.
    """

    def __init__(self, vae: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        net = _load(vae)
        self.is_tiny = type(net).__name__ == "AutoencoderTiny"
        channels, factor = _tried(net.eval(), vae)
        name = str(Path(vae).resolve()) if Path(vae).is_dir() else vae
        with explained(f"the configuration of the autoencoder {vae}", KeyError, TypeError, ValueError):
            normalisation = _normalisation(net.config, self.is_tiny)
            self.space = LatentSpace(name, digest(net.state_dict()), channels=channels, factor=factor, **normalisation)
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
        return _moments(self.net.encode(x))

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
    keys = ("channels", "factor") if autoencoder.is_tiny else ("channels", "factor", *NORMALISATION)
    space.check_same(autoencoder.space, "the checkpoint", "--vae" if vae else "its autoencoder now", keys)
    return autoencoder


def _moments(encoded: Mapping[str, Any]) -> Tensor:
    """Return float32 moments (b, 2c, h, w) of what `encode` of an autoencoder of diffusers returns."""
    posterior = encoded.get("latent_dist")
    if posterior is not None:
        return torch.cat([posterior.mean.float(), posterior.logvar.float()], dim=1)
    found = encoded.get("latent", encoded.get("latents"))  # of AutoencoderDC and AutoencoderTiny, without variance
    mean = found.float()
    return torch.cat([mean, torch.full_like(mean, NO_VARIANCE)], dim=1)


@torch.no_grad()
def _tried(net: nn.Module, vae: str) -> tuple[int, int]:
    """Return latent channels and pixels per latent cell of an autoencoder, which encodes and decodes an image."""
    hint = "it must encode and decode images of shape (1, 3, height, width)"
    # Any error is explained: a configuration can describe a network that no forward pass fits.
    with explained(f"the autoencoder {vae} does not work", Exception, hint=hint):
        widths = net.config.get("block_out_channels") or net.config.get("encoder_block_out_channels") or ()
        side = max(LEAST_SIDE, 2 ** len(widths))  # at least two cells, each level but the last halves the sides
        image = torch.zeros(1, 3, side, side, dtype=net.dtype)
        moments = _moments(net.encode(image)).to(net.dtype)
        channels, cells = moments.shape[1] // 2, moments.shape[2]
        if moments.shape != (1, 2 * channels, cells, cells) or cells < 1 or side % cells:
            raise ValueError(f"an image of {side} pixels becomes moments of shape {tuple(moments.shape)}")
        shape = net.decode(moments[:, :channels]).sample.shape
        if shape != image.shape:
            raise ValueError(f"an image of {side} pixels comes back in shape {tuple(shape)}")
    return channels, side // cells


def _normalisation(config: Mapping[str, Any], is_tiny: bool) -> dict[str, Any]:
    """Return the numbers of a configuration that normalise latents, as fields of a `LatentSpace`."""
    found = {"channel_mean": config.get("latents_mean"), "channel_std": config.get("latents_std")}
    found = {name: tuple(map(float, values)) for name, values in found.items() if values}
    shift = 0.0 if is_tiny or "channel_mean" in found else float(config.get("shift_factor") or 0.0)
    scale = config.get("scaling_factor") or 1.0 if found else config["scaling_factor"]
    return {"scale": float(scale), "shift": shift, **found}


def _check_exists(vae: str) -> None:
    """Raise an error unless this is a folder, or an autoencoder of the hub that is in the cache or can be reached.

    One request is made: diffusers' own loading repeats it for half a minute where there is no network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if Path(vae).exists():
        return
    if not HUB_ID.fullmatch(vae):
        raise UserError(f"the autoencoder {vae} cannot be loaded: there is no such folder; name one with --vae")
    if not isinstance(try_to_load_from_cache(vae, CONFIG), str):
        get_hf_file_metadata(hf_hub_url(vae, CONFIG))


def _load(vae: str) -> nn.Module:
    """Load an autoencoder of diffusers; raise a UserError if it is missing, incomplete or not supported."""
    import diffusers

    hint = "name a folder of diffusers' with --vae, or fetch it where there is a network"
    # Any error is explained: a damaged configuration can make diffusers raise anything.
    with explained(f"the autoencoder {vae} cannot be loaded", Exception, hint=hint):
        _check_exists(vae)
        config = diffusers.AutoencoderKL.load_config(vae)
        kind = getattr(diffusers, str(config.get("_class_name")), None)
        if not _is_autoencoder(kind):
            known = "AutoencoderKL, AutoencoderDC and AutoencoderTiny"
            raise UserError(f"{vae} is a {config.get('_class_name')}, not an autoencoder of diffusers such as {known}")
        net, info = kind.from_pretrained(vae, output_loading_info=True)
    missing = [*info["missing_keys"], *info["mismatched_keys"]]
    if missing:
        raise UserError(f"the autoencoder {vae} lacks {len(missing)} of its weights, the first is {missing[0]}")
    for file in Path(vae).glob("*.safetensors"):  # diffusers casts what is quantised, without its scale
        with safe_open(file, "pt") as stored:
            kinds = {stored.get_slice(name).get_dtype() for name in stored.keys()} - {"F16", "BF16", "F32", "F64"}  # noqa: SIM118
        if kinds:
            raise UserError(f"{file} has weights of the type {min(kinds)}: they must be floating-point")
    return net


def _is_autoencoder(kind: Any) -> bool:
    """Return whether this is a model class of diffusers that encodes and decodes."""
    import diffusers

    is_model = isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)
    return is_model and all(callable(getattr(kind, name, None)) for name in ("encode", "decode"))
