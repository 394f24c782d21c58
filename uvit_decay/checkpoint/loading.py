"""From a file to a network that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.checkpoint.files import Weights, read
from uvit_decay.diffusion.generate import Sampling, Source
from uvit_decay.diffusion.loss import Prediction
from uvit_decay.diffusion.path import Path as NoisePath
from uvit_decay.errors import UserError, one_line
from uvit_decay.specs import build, of_this_version


@dataclass(frozen=True)
class Checkpoint:
    """A trained network, in eval mode, and its description.

    `weights` says which weights it holds; `step` is the optimizer step that it was saved at.
    """

    net: nn.Module
    path: NoisePath
    prediction: Prediction
    sampling: Sampling
    class_names: tuple[str, ...]
    data: str
    step: int
    weights: Weights
    latents: LatentSpace | None  # None: pixels

    def source(self, device: torch.device) -> Source:
        """The network on `device`, as samplers want it."""
        return Source.of(self.net.to(device), self.path, self.prediction, device, self.latents is None)


def load(path: Path, weights: Weights | None = None, trusted: Sequence[str] = ()) -> Checkpoint:
    """Read a checkpoint of either form.

    Args:
        path: a .ckpt or a .safetensors file.
        weights: null takes EMA weights where the file has them, else raw ones.
        trusted: full names of classes outside uvit_decay that the file may name as its network.

    Raises:
        UserError: missing, truncated or foreign file, one that carries code, weights that it does not have.
    """
    description, state, kind = read(path, weights)
    net = build(description["net"], nn.Module, "uvit_decay.nn", trusted)
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{path}: the weights do not fit the network that it describes: {one_line(error)}") from error
    with of_this_version(str(path)):
        sampling = Sampling.restored(description["sampling"])
        latents = LatentSpace(**description["latents"]) if description.get("latents") else None
    return Checkpoint(
        net.eval(),
        build(description["path"], NoisePath, "uvit_decay.diffusion.path", ()),
        description["prediction"],
        sampling,
        tuple(description["class_names"]),
        description["data"],
        description["step"],
        kind,
        latents,
    )
