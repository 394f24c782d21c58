"""Conversion between images and latents by an autoencoder of diffusers.

The methods `encode` and `decode` of diffusers do not apply the normalisation in the autoencoder's configuration: only
`LatentSpace` applies it, in both directions. AutoencoderRAE, whose methods do apply them, is not supported: it
decodes every image to the same size.
b = batch, c = latent channels, h and w = latent cells, H and W = pixels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uvit_decay.files.diffusers_files import find_weights
from uvit_decay.files.tensor_files import digest
from uvit_decay.files.writing import check_file, quote_path
from uvit_decay.latents.space import NORMALISATION, LatentSpace
from uvit_decay.pictures import to_float, to_uint8
from uvit_decay.terminal.errors import UserError, explain

SLICE_PIXELS = 8 * 256**2  # decoded in one slice: about 5 GB for Stable Diffusion's decoder in float32
NO_VARIANCE = -30.0  # log-variance for encoders without one: the lower bound to which AutoencoderKL clamps
LEAST_SIDE = 64  # pixels of the trial image
CONFIG = "config.json"  # of an autoencoder
PIPELINE_INDEX, PART = "model_index.json", "vae"  # of a pipeline: its index, and the folder of its autoencoder
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


class Autoencoder:
    """A frozen autoencoder of diffusers, from the hub or from a folder.

    It may have any class of diffusers that encodes and decodes images (b, 3, H, W), such as AutoencoderKL,
    AutoencoderDC and AutoencoderTiny.

    Args:
        vae: hub id, or folder written by `save_pretrained`, with plain weights, a variant such as fp16, or shards; the
            folder of a whole pipeline means its `vae/`.
        device: device of the weights.
        dtype: float32 or bfloat16; float16 overflows in Stable Diffusion's decoder.
    """

    def __init__(self, vae: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        part = Path(vae) / PART
        if (Path(vae) / PIPELINE_INDEX).is_file() and (part / CONFIG).is_file():
            vae = str(part)
        name = absolute_name(vae)
        net = _load(vae)
        self.is_tiny = type(net).__name__ == "AutoencoderTiny"
        channels, factor = _try(net.eval(), vae)
        with explain(f"the configuration of the autoencoder {vae}", KeyError, TypeError, ValueError):
            normalisation = _normalisation(net.config, self.is_tiny)
            sha256 = digest(net.state_dict())
            self.space = LatentSpace(name, sha256, channels=channels, factor=factor, **normalisation)
        self.dtype = dtype
        # Twice as fast with channels last in bfloat16 on CPUs; float32 gains 5 % and keeps the same bytes.
        layout = torch.channels_last if dtype == torch.bfloat16 else torch.preserve_format
        net = nn.Module.to(net, device, dtype, memory_format=layout)  # ModelMixin.to advises against it
        self.net = net.eval().requires_grad_(False)

    def on(self, device: torch.device | str) -> Autoencoder:
        """Return a copy on `device`; its memory is freed with the last reference to it."""
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
        slices = decode_slices(self.net, self.space, x.to(self.net.device), self.dtype)
        return torch.cat([to_uint8(images) for images in slices])


def absolute_name(vae: str) -> str:
    """Return the absolute path of an autoencoder's folder; a hub id stays as it is."""
    folder = Path(vae)
    if folder.exists():
        return str(folder.resolve())
    if not HUB_ID.fullmatch(vae):
        raise UserError(f"the autoencoder {vae} cannot be loaded: no such folder; give a folder or a hub id with `vae`")
    return vae


def _load(vae: str) -> nn.Module:
    """Load an autoencoder of diffusers; raise a UserError if it is missing or incomplete."""
    import diffusers

    hint = "give a folder of diffusers with `vae`, or download it while there is a network"
    # Any error is explained: a damaged configuration can make diffusers raise anything.
    with explain(f"the autoencoder {vae} cannot be loaded", Exception, hint=hint):
        name = diffusers.AutoencoderKL.load_config(vae).get("_class_name")
        folder = Path(vae)
        for file in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
            check_file(file)
        found = find_weights(folder) if folder.is_dir() else None
        variant = None if found is None else found.variant
        kind = getattr(diffusers, name)
        net, info = kind.from_pretrained(vae, output_loading_info=True, variant=variant)
    missing = [*info["missing_keys"], *info["mismatched_keys"]]
    if missing:
        raise UserError(f"the autoencoder {vae} lacks {len(missing)} of its weights, the first is {missing[0]}")
    return net


def decode_slices(net: nn.Module, space: LatentSpace, x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the images of normalised latents x (b, c, h, w), in slices that fit into memory.

    Args:
        net: autoencoder of diffusers, on the device of x.
        space: its latent space.
        x: states of a network.
        dtype: dtype of the autoencoder's weights.

    Returns:
        images (slice, 3, H, W) of about [-1, 1], in `dtype`.
    """
    pixels = x.shape[-1] * x.shape[-2] * space.factor**2
    count = max(1, SLICE_PIXELS // pixels)
    z = space.denormalise(x).to(dtype)
    for part in z.split(count):
        yield net.decode(part).sample


def decoder(space: LatentSpace | None, vae: str | None, device: torch.device | str) -> Autoencoder | None:
    """Return the autoencoder that decodes the latents of a checkpoint.

    Args:
        space: latent space of the checkpoint; None for pixels.
        vae: another autoencoder of this latent space; None for the autoencoder that encoded the latents.
        device: device of the weights.

    Returns:
        the autoencoder; None for pixels.

    Raises:
        UserError: `vae` has another latent space or is given for pixels, or the encoder's weights have changed.
    """
    if space is None:
        if vae is not None:
            raise UserError(f"`vae` {vae}: the network of this checkpoint works on pixels; leave out `vae`")
        return None
    autoencoder = Autoencoder(vae or space.vae, device)
    if vae is None and space.sha256 not in ("", autoencoder.space.sha256):
        what = f"{space.vae}: its weights have changed since the latents were encoded"
        raise UserError(f"{what}; to use them, add `vae` {quote_path(space.vae)}")
    keys: tuple[str, ...] = ("channels", "factor")
    if not autoencoder.is_tiny:  # AutoencoderTiny decodes x itself, whatever the scale of the imitated AutoencoderKL
        keys += NORMALISATION
    space.check_same(autoencoder.space, "the checkpoint", "`vae`" if vae else "its autoencoder now", keys)
    return autoencoder


def _moments(encoded: Mapping[str, Any]) -> Tensor:
    """Return float32 moments (b, 2c, h, w) from the output of `encode` of an autoencoder of diffusers."""
    posterior = encoded.get("latent_dist")
    if posterior is not None:
        return torch.cat([posterior.mean.float(), posterior.logvar.float()], dim=1)
    latents = encoded.get("latent", encoded.get("latents"))  # AutoencoderDC, AutoencoderTiny: no variance
    mean = latents.float()
    return torch.cat([mean, torch.full_like(mean, NO_VARIANCE)], dim=1)


@torch.no_grad()
def _try(net: nn.Module, vae: str) -> tuple[int, int]:
    """Encode and decode an image; return the number of latent channels, and the pixels per latent cell."""
    hint = "it must encode and decode images of shape (1, 3, height, width)"
    # Any error is explained: a configuration may describe another network, or one without a valid forward pass.
    with explain(f"the autoencoder {vae} does not work", Exception, hint=hint):
        widths = net.config.get("block_out_channels") or net.config.get("encoder_block_out_channels") or ()
        side = max(LEAST_SIDE, 2 ** len(widths))  # at least two cells, because each level but the last halves the sides
        image = torch.zeros(1, 3, side, side, dtype=net.dtype)
        moments = _moments(net.encode(image)).to(net.dtype)
        channels = moments.shape[1] // 2
        cells = moments.shape[2]
        shape = net.decode(moments[:, :channels]).sample.shape
        if shape != image.shape:
            raise ValueError(f"it decodes the latents of an image of {side} pixels to shape {tuple(shape)}")
    return channels, side // cells


def _normalisation(config: Mapping[str, Any], is_tiny: bool) -> dict[str, Any]:
    """Return the normalisation in a configuration, as fields of a `LatentSpace`."""
    fields: dict[str, Any] = {}
    for name, key in (("channel_mean", "latents_mean"), ("channel_std", "latents_std")):
        if config.get(key):
            fields[name] = tuple(map(float, config[key]))
    scale = config.get("scaling_factor")
    if fields and not scale:
        scale = 1.0
    if scale is None:
        raise ValueError("it has no scaling_factor")
    shift = 0.0
    if not is_tiny and "channel_mean" not in fields:
        shift = float(config.get("shift_factor") or 0.0)
    return {"scale": float(scale), "shift": shift, **fields}
