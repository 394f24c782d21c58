"""Loading of checkpoints: from a file to a network ready for sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.checkpoint.io import Stored, Weights, misfit, read
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.prediction import Prediction
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.instantiate import build

HOME = "uvit_decay.nn"
SAID = ("image_size", "channels", "num_classes", "null_label")  # attributes of every network that can be sampled


@dataclass(frozen=True)
class Checkpoint:
    """A trained network in eval mode and its description.

    `weights` names the loaded set of weights; `step` is the optimizer step at which it was saved.
    """

    net: nn.Module
    path: NoisePath
    prediction: Prediction
    sampling: Sampling
    class_names: tuple[str, ...]
    data: str
    step: int
    weights: Weights
    latents: LatentSpace | None  # None for a network of pixels

    def source(self, device: torch.device) -> DiffusionModel:
        """Return the network on `device` in the form that samplers take."""
        return DiffusionModel.of(self.net.to(device), self.path, self.prediction, device, self.latents is None)


def load(path: Path, weights: Weights | None = None, trusted: Sequence[str] = ()) -> Checkpoint:
    """Load a checkpoint of either format.

    Args:
        path: a .ckpt or a .safetensors file.
        weights: the set to load; None takes EMA weights if the file has them, else raw ones.
        trusted: qualified names of classes outside uvit_decay that the file may name as its network.

    Raises:
        UserError: missing, damaged or third-party file, one that contains code, weights that it lacks, that are not
            finite, or that do not fit the description.
    """
    stored = read(path, weights)
    description = stored.description
    net = described(path, stored, trusted)
    copies = {name: value.clone(memory_format=torch.contiguous_format) for name, value in stored.state.items()}
    ours = description.net.is_from(HOME)
    net.load_state_dict(copies, assign=ours)
    if ours:
        net.float()
    for name in SAID:
        if not isinstance(getattr(net, name, None), int):
            raise UserError(f"{path} describes a {type(net).__name__}, which makes no images: it has no {name}")
    latents, names = description.latents, description.class_names
    if latents and latents.channels != net.channels:
        raise UserError(f"{path} describes latents of {latents.channels} channels, its network has {net.channels}")
    if len(names) != net.num_classes:
        raise UserError(f"{path} names {len(names)} classes, its network has {net.num_classes}")
    return Checkpoint(
        net.eval(),
        build(description.path, NoisePath, "uvit_decay.diffusion.noise_path"),
        description.prediction,
        description.sampling,
        names,
        description.data,
        description.step,
        stored.weights,
        latents,
    )


def described(path: Path, stored: Stored, trusted: Sequence[str] = ()) -> nn.Module:
    """Build the network that a file describes, check that the weights fit it, and return it without them.

    A network of this package is built on the meta device and takes no memory.

    Raises:
        UserError: its class is not trusted, its sizes are out of range, the weights do not fit it, or some of its
            parameters have no EMA weights.
    """
    spec, state = stored.description.net, stored.state
    if spec.is_from(HOME):
        _check_sizes(path, spec.init_args, state)
    with torch.device("meta" if spec.is_from(HOME) else "cpu"):
        net = build(spec, nn.Module, HOME, trusted)
    problem = misfit(net, state)
    if problem:
        raise UserError(f"{path}: the weights do not fit the network that it describes: it {problem}")
    raw = stored.not_averaged & dict(net.named_parameters()).keys()
    if raw:
        raise UserError(f"{path} is damaged: {len(raw)} of its EMA weights are missing, such as {min(raw)}")
    return net


def _check_sizes(path: Path, init_args: dict[str, object], state: dict[str, Tensor]) -> None:
    """Raise a UserError if the described network is larger than its weights, before any block is built."""
    numbers = sum(value.numel() for value in state.values())
    for name, value in init_args.items():
        most = len(state) if name == "depth" else numbers
        if type(value) is int and value > most:
            raise UserError(f"{path} describes a network of {name} {value}, its weights are {most} at most")
