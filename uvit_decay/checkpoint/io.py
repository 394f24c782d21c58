"""Model cards, and reading of checkpoints, from a file to a network ready for sampling.

No code that a file contains is executed. Third-party files are read by the same functions, to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.checkpoint.detect import ThirdParty, looks_like
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.prediction import Prediction, Weighting
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.nn.base import check_attributes
from uvit_decay.runtime.errors import UserError, check_whole
from uvit_decay.runtime.instantiate import Spec, build
from uvit_decay.runtime.program import localised, or_bundled
from uvit_decay.runtime.tensor_files import TorchFile, check_weights, load_any, load_tensors, mismatch
from uvit_decay.runtime.validation import is_plain, parse, typed
from uvit_decay.sampling_options import Weights

KEY = "uvit_decay"  # key of the card in a .ckpt, and in the metadata of a .safetensors
NET, OWN = "net.", "task."  # beginnings of names in the state_dict of a .ckpt: the network, what else a task trains
VERSION = 1  # of the form of a card, to be raised when an older reader would misunderstand it
HOME = "uvit_decay.nn"  # package of the networks that a file may name
WEIGHTS = "denoiser/diffusion_pytorch_model.safetensors"  # in a folder that was exported for diffusers
INDEX, AUTOENCODER = "model_index.json", "vae"  # of such a folder, the second only of a checkpoint of latents


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """All that is needed besides the weights to use a network, to resume its training and to export it.

    A denoiser has path, prediction and sampling; all three are None for an encoder or a classifier.

    Args:
        version: of the form of the card.
        net: class and arguments of the network.
        path: class and arguments of the noise path.
        prediction: quantity that the network predicts.
        sampling: default sampling.
        class_names: names of the real classes; empty if the network is unconditional or has no classifier.
        data: name of the training data.
        step: optimizer steps so far.
        latents: latent space of the data; None for pixels.
        weighting: weighting of the loss; None if it is not known, as for imported files.
        class_hash: sha256 of the class names of the data; None if it is not known.
        data_hash: `ImageData.fingerprint` of the training data, the same in any folder; None if it is not known.
        weights: set of weights in an exported file; None for a .ckpt, which may have both.

    Raises:
        UserError: a number out of range, or a part of a denoiser without the others.
    """

    version: int = VERSION
    net: Spec
    path: Spec | None = None
    prediction: Prediction | None = None
    sampling: Sampling | None = None
    class_names: tuple[str, ...]
    data: str
    step: int
    latents: LatentSpace | None = None
    weighting: Weighting | None = None
    class_hash: str | None = None
    data_hash: str | None = None
    weights: Weights | None = None

    def __post_init__(self) -> None:
        if self.version > VERSION:
            raise UserError(
                f"its model card has version {self.version}, known are those up to {VERSION}: update uvit_decay"
            )
        check_whole(0, 2**63 - 1, step=self.step)
        absent = [name for name in ("path", "prediction", "sampling") if getattr(self, name) is None]
        if len(absent) in (1, 2):
            raise UserError(f"its model card lacks {absent[0]}, a denoiser has path, prediction and sampling")

    @classmethod
    def from_dict(cls, values: Any, where: Path | str) -> ModelCard:
        """Return the card with these values, read from the file `where`; entries that are no fields are ignored.

        Cards without a version are read as version 1.

        Raises:
            UserError: a newer version, values that are not plain, or fields that are missing or of the wrong type.
        """
        known = {field.name for field in fields(cls)}
        try:
            if not is_plain(values):
                raise UserError("its model card holds more than names and plain values, or has no end")
            values = typed(dict[str, object], values, "its model card")
            return typed(cls, {name: value for name, value in values.items() if name in known}, "its model card")
        except UserError as error:
            raise UserError(f"{where} is damaged, or of another version of this project: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values that a checkpoint stores; fields that are None are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def noise_path(self, trusted: Sequence[str] = ()) -> NoisePath | None:
        """Return the noise path, which must be one of this package or `trusted`; None if there is no denoiser."""
        return self.path and build(self.path, NoisePath, NoisePath.__module__, trusted)


@dataclass(frozen=True)
class Checkpoint:
    """A trained network in eval mode, its model card, and its noise path, which is None if it makes no images."""

    net: nn.Module
    card: ModelCard  # of the set of weights that was loaded
    path: NoisePath | None

    def check_denoiser(self) -> None:
        """Raise a UserError if the network makes no images."""
        if self.path is None:
            kind = "a classifier" if self.card.class_names else "an encoder"
            raise UserError(
                f"this checkpoint is of {kind} ({type(self.net).__name__}), which makes no images: "
                + localised("evaluate.py probe and classify judge its features")
            )

    def source(self, device: torch.device) -> DiffusionModel:
        """Return the network on `device` in the form that samplers take; raise a UserError if it is no denoiser."""
        self.check_denoiser()
        card = self.card
        return DiffusionModel.from_net(self.net.to(device), self.path, card.prediction, device, card.latents is None)


def load(path: Path, weights: Weights | None = None, trusted: Sequence[str] = ()) -> Checkpoint:
    """Load a checkpoint of any format.

    Args:
        path: a .ckpt or a .safetensors file, or a folder that was exported for diffusers.
        weights: the set to load; None takes EMA weights if the file has them, else raw ones.
        trusted: classes outside uvit_decay, or modules, that the file may name for its network or its noise path.

    Raises:
        UserError: missing, damaged or third-party file, one that contains code, weights that it lacks, that are not
            finite, or that do not fit the card.
    """
    stored = read(path, weights)
    card, net = stored.card, stored.network(trusted)
    ours = card.net.is_from(HOME)
    copies = {name: value.clone(memory_format=torch.contiguous_format) for name, value in stored.state.items()}
    net.load_state_dict(copies, assign=ours)
    if ours:
        net.float()
    check_attributes(net, f"{path} describes a {type(net).__name__}")
    latents, names = card.latents, card.class_names
    if latents and latents.channels != net.channels:
        raise UserError(f"{path} describes latents of {latents.channels} channels, its network has {net.channels}")
    if len(names) != net.num_classes:
        raise UserError(f"{path} names {len(names)} classes, its network has {net.num_classes}")
    return Checkpoint(net.eval(), card, card.noise_path(trusted))


@dataclass(frozen=True)
class StoredModel:
    """One set of weights in the file `where`, and its card; `not_averaged` names raw ones among EMA weights.

    `notes` are lines for the user on how an official file was read.
    """

    where: Path
    card: ModelCard
    state: dict[str, Tensor]
    not_averaged: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def network(self, trusted: Sequence[str] = ()) -> nn.Module:
        """Build the network that the card describes, check that the weights fit it, and return it without them.

        A network of this package is built on the meta device and takes no memory; another class must be `trusted`.
        """
        spec = self.card.net
        with torch.device("meta" if spec.is_from(HOME) else "cpu"):
            net = build(spec, nn.Module, HOME, trusted)
        if problem := mismatch(net, self.state):
            raise UserError(f"{self.where}: the weights do not fit the network that it describes: {problem}")
        if raw := self.not_averaged & dict(net.named_parameters()).keys():
            raise UserError(f"{self.where} is damaged: {len(raw)} of its EMA weights are missing, such as {min(raw)}")
        return net


def read(path: Path, weights: Weights | None) -> StoredModel:
    """Read a checkpoint of any format; check types, checksums and finiteness, but not the fit to the network.

    If checkpoints/digits.safetensors does not exist in the working directory, the bundled copy is read.
    """
    path = Path(path) if Path(path).exists() else or_bundled(path)
    file = weights_file(path)
    stored = _read_exported(file) if file.suffix == ".safetensors" else _read_training(file, weights)
    if file != path:  # a folder, which has its own autoencoder
        latents = stored.card.latents
        if latents and (path / AUTOENCODER).is_dir():
            latents = replace(latents, vae=str((path / AUTOENCODER).absolute()))
        card = replace(stored.card, latents=latents)
        stored = replace(stored, card=card, state=without_prefix(stored.state, "net.", path))
    if weights not in (None, stored.card.weights):
        raise UserError(f"{path} holds {stored.card.weights} weights, not {weights}")
    check_weights(file, stored.state)
    return stored


def is_folder(path: Path) -> bool:
    """Return whether this is a folder that was exported for diffusers."""
    return (path / INDEX).is_file() and (path / WEIGHTS).is_file()


def weights_file(path: Path) -> Path:
    """Return the weights file of a checkpoint: `path` itself or, in a diffusers folder, the denoiser's weights."""
    return path / WEIGHTS if is_folder(path) else path


def _read_exported(path: Path) -> StoredModel:
    metadata, state = load_tensors(path)
    if KEY not in metadata:
        raise ThirdParty(f"{path} was not exported by this project, it looks like {looks_like(state)}")
    card = ModelCard.from_dict(parse(metadata[KEY], path), path)
    if card.weights is None:
        raise UserError(f"the model card in {path} does not say which weights these are: it is damaged")
    return StoredModel(path, card, state)


def without_prefix(state: Mapping[Any, Any], prefix: str, where: Path) -> dict[str, Any]:
    """Return the entries under their names without a prefix; raise a UserError if two entries have the same name then.

    `where` is the file that they are from.
    """
    renamed = {str(name).removeprefix(prefix): value for name, value in state.items()}
    if len(renamed) < len(state):
        twice = next(name for name in state if f"{prefix}{name}" in state)
        raise UserError(f"{where} has both {twice} and {prefix}{twice}: it is damaged, or two networks in one file")
    return renamed


def _read_training(path: Path, weights: Weights | None) -> StoredModel:
    contents = read_training_checkpoint(path)
    card = ModelCard.from_dict(contents[KEY], path)
    state = typed(dict[str, Tensor], contents.get("state_dict"), f"state_dict of {path}")
    state = _network_state(state, path)
    callbacks = typed(dict[str, object], contents.get("callbacks"), f"callbacks of {path}")
    shadow = average(callbacks.get("EMA", {}), path)
    if weights == "ema" and not shadow:
        raise UserError(f"{path} holds no EMA weights: its run had no EMA callback")
    if weights == "raw" or not shadow:
        return StoredModel(path, replace(card, weights="raw"), state)
    return StoredModel(path, replace(card, weights="ema"), state | shadow, frozenset(state.keys() - shadow.keys()))


def _network_state(state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the weights `net.*` of a training checkpoint without this prefix.

    A task stores `task.*` beside its network (`uvit_decay/tasks/own.py`), which is not read here.

    Raises:
        UserError: any other name.
    """
    if other := [name for name in state if not name.startswith((NET, OWN))]:
        raise UserError(f"{path} is damaged: state_dict has {other[0]}, which is neither net.* nor task.*")
    return {name.removeprefix(NET): value for name, value in state.items() if name.startswith(NET)}


def average(state: object, where: object) -> dict[str, Tensor]:
    """Return the average in a state of the callback `EMA`, from the file `where`; it is empty if there was none."""
    state = typed(dict[str, object], state, f"EMA of {where}")
    return typed(dict[str, Tensor], state.get("shadow", {}), f"EMA weights of {where}")


def read_training_checkpoint(path: Path, whole: bool = True) -> dict[str, Any]:
    """Return the contents of a .ckpt of this project, compared with the checksums of its zip; see `TorchFile`."""
    with open_training_checkpoint(path) as file:
        contents = file.read(whole)
    check_ours(contents, path)
    return contents


def open_training_checkpoint(path: Path) -> TorchFile:
    """Open a .ckpt, whose contents may still be of another program."""
    if path.suffix == ".safetensors":
        raise UserError(f"{path} has weights but no optimizer: name a .ckpt of a run, such as checkpoints/last.ckpt")
    return TorchFile(path)


def check_ours(contents: object, where: Path | str) -> None:
    """Raise ThirdParty unless these are the contents of a .ckpt of this project."""
    if not isinstance(contents, dict) or KEY not in contents:
        raise ThirdParty(f"{where} was not written by this project, it looks like {looks_like(contents)}")


def read_third_party(path: Path) -> Any:
    """Load a third-party checkpoint; raise a UserError for a checkpoint of this project."""
    metadata, contents = load_any(path)
    if KEY in metadata or (isinstance(contents, dict) and KEY in contents):
        raise UserError(f"{path} is a checkpoint of this project: use it as it is, or export it")
    return contents
