"""Networks whose features are evaluated, by the names of the command line: checkpoints, timm's models, raw pixels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from uvit_decay import checkpoint
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.encoders.timm_models import timm_vit
from uvit_decay.files.writing import at_home
from uvit_decay.generation.options import TIMM, LoadingOptions
from uvit_decay.latents.space import LatentSpace
from uvit_decay.nn.intermediates import Layer
from uvit_decay.runs.history import name_run, run_of
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types

Interpolation = Literal["bilinear", "bicubic"]
PIXELS = "pixels:"  # pixels:32x32x3


@dataclass(frozen=True)
class ProbedNetwork:
    """A network in eval mode whose features are evaluated.

    Args:
        net: the network.
        name: name of the network in names of result files.
        title: name of the network in titles.
        about: description of the weights for reports, as plain values.
        path: noise path of a denoiser's input; None for an encoder, which sees clean images.
        data: name of the images that the network was trained on; None if unknown.
        latents: latent space of the network's input; None for pixels.
        class_names: names of the classes of a classifier or of a conditional denoiser; empty if there are none.
        fingerprint: fingerprint of the images that the network was trained on; None if it is not known.
    """

    net: nn.Module
    name: str
    title: str
    about: dict[str, Any]
    path: NoisePath | None = None
    data: str | None = None
    latents: LatentSpace | None = None
    class_names: tuple[str, ...] = ()
    fingerprint: str | None = None

    @property
    def is_encoder(self) -> bool:
        """True if the network sees clean images."""
        return self.path is None


def final_norm(net: nn.Module) -> nn.Module | None:
    """Return the layer norm that a network applies after its last block; None if it has none."""
    return dict(net.named_children()).get("norm")


@check_types
def open_network(ckpt: Path, loading: LoadingOptions, size: int | None = None) -> ProbedNetwork:
    """Load a checkpoint, timm's vision transformer timm:NAME or timm:NAME=FILE, or raw pixels, pixels:32x32x3.

    Args:
        ckpt: path of the checkpoint, or one of these names.
        loading: options of loading a checkpoint.
        size: side of the images that a timm model takes, in pixels; None for the model's own.
    """
    name = str(ckpt)
    if not name.startswith((TIMM, PIXELS)):
        return _open_checkpoint(ckpt, loading)
    if loading.weights is not None:
        raise UserError(f"only checkpoints of uvit_decay have ema and raw, {ckpt} has not", argument="weights")
    if name.startswith(PIXELS):
        about = {"checkpoint": name, "weights": "none"}
        net = Pixels(name.removeprefix(PIXELS))
        return ProbedNetwork(net, name.replace(":", "-"), "raw pixels", about)
    model, _, file = name.removeprefix(TIMM).partition("=")
    about = {"checkpoint": name, "weights": file or "pretrained", "model": f"timm {model}"}
    path = None
    shown = model
    if file:
        path = at_home(file)
        shown += f"-{path.stem}"
    return ProbedNetwork(timm_vit(model, path, size), shown, model, about)


def _open_checkpoint(path: Path, loading: LoadingOptions) -> ProbedNetwork:
    """Open a checkpoint of uvit_decay; its run's name and version are part of the name: "digits-version_1-"."""
    loaded = checkpoint.load(path, loading.weights, loading.trust)
    card = loaded.card
    about = {"checkpoint": str(path), "step": card.step, "weights": card.weights}
    name = f"{path.stem}-step{card.step}-{card.weights}"
    run = run_of(path.resolve())
    if run is not None and run.name.startswith("version_"):
        name = f"{run.parent.name}-{run.name}-{name}"
    titled = path.name
    if run is not None and path.suffix == ".ckpt":  # exported files, as in checkpoints/, are named by themselves
        titled = name_run(run)
    title = f"{titled}, step {card.step}"
    return ProbedNetwork(
        loaded.net, name, title, about, loaded.path, card.data, card.latents, card.class_names, card.data_hash
    )


def fit_pictures(
    x: Float[Tensor, "b c h w"], net: nn.Module, where: str, mode: Interpolation = "bicubic"
) -> Float[Tensor, "b c2 h2 w2"]:
    """Return pictures in [-1, 1] with the number of channels and the size that a network takes.

    Grey pictures are repeated for all channels. Pictures of another size are resized with antialias and clamped.

    Args:
        x: pictures in [-1, 1].
        net: the network.
        where: name of the network, at the beginning of the error message.
        mode: how pictures are resized.
    """
    if x.shape[1] != net.channels:
        if x.shape[1] != 1:
            raise UserError(f"{where} has {net.channels} channels, the images have {x.shape[1]}")
        x = x.expand(-1, net.channels, -1, -1)
    if x.shape[-1] == net.image_size:
        return x
    return interpolate(x, size=(net.image_size,) * 2, mode=mode, antialias=True).clamp(-1, 1)


class Pixels(nn.Module):
    """A network whose only layer is the image itself, values in [-1, 1] in one token of dim = channels * size^2.

    Args:
        size: WIDTHxHEIGHTxCHANNELS of the images, such as 32x32x3; width and height are equal.
    """

    layers = (Layer("pixels", "embeddings"),)
    num_prefix_tokens = 0
    num_classes = 0
    null_label = False
    class_token = False

    def __init__(self, size: str) -> None:
        super().__init__()
        numbers = re.fullmatch(r"([1-9]\d{0,4})x\1x([1-9]\d{0,4})", size)
        if not numbers:
            raise UserError(f"pixels:{size}: not a size of square images; write it as in pixels:32x32x3")
        self.image_size = int(numbers[1])
        self.channels = int(numbers[2])
        self.dim = self.channels * self.image_size**2

    def forward_intermediates(self, x: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b 1 d"]]:
        """Yield the pixels of each image as one token."""
        yield x.flatten(1)[:, None]
