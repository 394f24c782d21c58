"""Networks named on the command line, to be judged by their features: checkpoints of this project and timm's models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from uvit_decay.runtime.errors import UserError

if TYPE_CHECKING:  # other rooms are known by their interfaces alone
    from uvit_decay.autoencoder import LatentSpace
    from uvit_decay.data import ImageData
    from uvit_decay.diffusion.noise_path import NoisePath
    from uvit_decay.sampling_options import LoadingOptions

TIMM = "timm:"  # timm:NAME, with pretrained weights, or timm:NAME=FILE
PIXELS = "pixels:"  # pixels:32x32x3


@dataclass(frozen=True)
class Judged:
    """A network in eval mode whose features are judged.

    Args:
        net: the network.
        name: name of files of results.
        title: name in titles.
        about: which weights these are, for reports, as plain values.
        path: noise path of a denoiser's input; None for an encoder, which sees clean images.
        data: name of the images that it was trained on; None if that is not known.
        latents: latent space of its input; None for pixels.
    """

    net: nn.Module
    name: str
    title: str
    about: dict[str, Any]
    path: NoisePath | None = None
    data: str | None = None
    latents: LatentSpace | None = None

    @property
    def is_encoder(self) -> bool:
        """Return whether it sees clean images."""
        return self.path is None


def open_network(ckpt: Path, loading: LoadingOptions, size: int | None = None) -> Judged:
    """Load a checkpoint, timm's vision transformer timm:NAME or timm:NAME=FILE, or raw pixels, pixels:32x32x3.

    `size` is the side of the images that a timm model takes, None its own.
    """
    name = str(ckpt)
    if not name.startswith((TIMM, PIXELS)):
        return _checkpoint(ckpt, loading)
    if loading.weights is not None:
        raise UserError(f"--weights are of checkpoints of this project, {ckpt} has no such choice")
    return _timm(name, size) if name.startswith(TIMM) else _pixels(name)


def _checkpoint(path: Path, loading: LoadingOptions) -> Judged:
    from uvit_decay import checkpoint
    from uvit_decay.weights import slug

    found = checkpoint.load(path, loading.weights, loading.trust)
    about = {"checkpoint": str(path), "step": found.card.step, "weights": str(found.card.weights)}
    name = f"{_run(path)}{path.stem}-step{found.card.step}-{slug(found.card.weights)}"
    return Judged(found.net, name, path.name, about, found.path, found.card.data, found.card.latents)


def _run(path: Path) -> str:
    """Return name and version of the run that a checkpoint lies in, "digits-version_1-", empty if it lies elsewhere."""
    from uvit_decay.checkpoint.newest import run_of

    run = run_of(path.resolve())
    return f"{run.parent.name}-{run.name}-" if run is not None and run.name.startswith("version_") else ""


def _timm(ckpt: str, size: int | None) -> Judged:
    from uvit_decay.representations.timm_model import timm_vit
    from uvit_decay.runtime.files import at_home

    name, _, file = ckpt.removeprefix(TIMM).partition("=")
    net = timm_vit(name, at_home(file) if file else None, size)
    about = {"checkpoint": ckpt, "weights": file or "pretrained", "model": f"timm {name}"}
    return Judged(net, f"{name}-{Path(file).stem}" if file else name, name, about)


def _pixels(ckpt: str) -> Judged:
    from uvit_decay.representations.pixels import Pixels

    return Judged(Pixels(ckpt.removeprefix(PIXELS)), "pixels", "raw pixels", {"checkpoint": ckpt, "weights": "none"})


def open_judging_data(judged: Judged, data: str | None, test: str | None) -> ImageData:
    """Open the data to judge a network's features on, by default those that it was trained on; see `open_data`."""
    from uvit_decay.evaluation.open_by_name import SETS, open_data

    if data is None and judged.data not in SETS:
        trained = f"was trained on {judged.data}: name it, or other data," if judged.data else "needs images: name some"
        raise UserError(f"{judged.name} {trained} with --data")
    return open_data(data or judged.data, test, judged.net.image_size, judged.net.channels, judged.is_encoder)
