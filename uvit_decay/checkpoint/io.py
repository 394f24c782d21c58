"""Model cards, and reading of checkpoints, from a file to a network ready for sampling.

No code that a file contains is executed. Third-party files are read by the same functions, to be imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.detect import KEY, ThirdParty, looks_like
from uvit_decay.checkpoint.options import Weights
from uvit_decay.decay.connection import Connection
from uvit_decay.decay.table import SHORTCUTS
from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.diffusion.prediction import Prediction, Weighting
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.files.instantiate import Spec, build, check_arguments, find_class
from uvit_decay.files.tensor_files import check_weights, load_pickle, load_tensors, mismatch
from uvit_decay.files.validation import as_type, parse
from uvit_decay.latents.space import LatentSpace
from uvit_decay.nn.base import check_attributes
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.program import localise, or_bundled
from uvit_decay.terminal.typed import check_types

NET = "net."  # prefix of the network's weights in the state_dict of a .ckpt
OWN = "task."  # prefix of further weights that a task trains
VERSION = 1  # version of the card's format, to be raised when an older reader would misunderstand it
HOME = "uvit_decay.nn"  # package of the networks that a file may name
# In a folder that was exported for diffusers:
WEIGHTS = "denoiser/diffusion_pytorch_model.safetensors"
INDEX = "model_index.json"
AUTOENCODER = "vae"  # only for latents


class UnknownName(UserError):
    """A checkpoint names an entry of a table that no imported module has added."""


def _check_known(what: str, name: object, known: Collection[str], where: Path | str) -> None:
    """Raise an UnknownName for a name outside a table to which modules of users add entries.

    Args:
        what: what is named, such as "schedule".
        name: the name; other values than str are not checked.
        known: names in the table.
        where: the file.
    """
    if isinstance(name, str) and name not in known:
        raise UnknownName(
            f"cannot read {where}: its {what} is {name!r}, known are {', '.join(known)}; if a module of yours adds "
            f"{name!r}, name it with --trust MODULE, or import it first in Python"
        )


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Metadata of a checkpoint: with the weights, all that is needed to use, resume or export a network.

    A denoiser has path, prediction and sampling; all three are None for an encoder or a classifier.

    Args:
        version: version of the card's format.
        net: class and arguments of the network.
        path: class and arguments of the noise path.
        prediction: quantity that the network predicts.
        sampling: default sampling.
        class_names: names of the real classes; empty if the network is unconditional or has no classifier.
        data: name of the training data.
        step: optimizer steps so far.
        latents: latent space of the data; None for pixels.
        weighting: weighting of the loss; None if unknown, as for imported files.
        class_hash: sha256 of the class names of the data; None if unknown.
        data_hash: `ImageData.fingerprint` of the training data, independent of their folder; None if unknown.
        weights: set of weights in an exported file; None for a .ckpt, which may have both.
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
                f"its model card has version {self.version}, this program reads up to {VERSION}: update uvit_decay"
            )

    @classmethod
    def from_dict(cls, values: Any, where: Path | str) -> ModelCard:
        """Return the card with these values; unknown entries are ignored, and a missing version means version 1.

        Args:
            values: entries of the card.
            where: file that they were read from, for error messages.
        """
        names = {field.name for field in fields(cls)}
        try:
            values = as_type(dict[str, object], values, "its model card")
            known = {name: value for name, value in values.items() if name in names}
            sampling = known.get("sampling")
            if isinstance(sampling, dict):
                _check_known("sampler", sampling.get("sampler"), SAMPLERS, where)
            return as_type(cls, known, "its model card")
        except UnknownName:
            raise
        except UserError as error:
            raise UserError(f"{where} is damaged, or of another version of this project: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values that a checkpoint stores, without fields that are None."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            json.dumps(values)
            ModelCard.from_dict(values, "the model card")
            check_arguments(self.net, HOME, "the model card")
            if self.path is not None:
                check_arguments(self.path, NoisePath.__module__, "the model card")
        except (TypeError, ValueError, UserError) as error:
            raise UserError(f"a checkpoint of this network could not be read back: {error}") from error
        return values

    def noise_path(self, trusted: Sequence[str] = ()) -> NoisePath | None:
        """Return the noise path; None for an encoder or a classifier. Its class is of this package or `trusted`."""
        return self.path and build(self.path, NoisePath, NoisePath.__module__, trusted)


@dataclass(frozen=True)
class Checkpoint:
    """A trained network in eval mode, with its model card and noise path."""

    net: nn.Module
    card: ModelCard  # its `weights` names the set of weights that was loaded
    path: NoisePath | None  # None for an encoder or a classifier

    def check_denoiser(self) -> None:
        """Raise a UserError if the network makes no images."""
        if self.path is None:
            kind = "a classifier" if self.card.class_names else "an encoder"
            raise UserError(
                f"this checkpoint is of {kind} ({type(self.net).__name__}), which makes no images: "
                + localise("evaluate its features with evaluate.py probe or classify")
            )

    def source(self, device: torch.device) -> DiffusionModel:
        """Return the network on `device` in the form that samplers take; raise a UserError unless it is a denoiser."""
        self.check_denoiser()
        card = self.card
        return DiffusionModel.from_net(self.net.to(device), self.path, card.prediction, device, card.latents is None)


@check_types
def load(path: Path | str, weights: Weights | None = None, trusted: Sequence[str] = ()) -> Checkpoint:
    """Load a checkpoint of any format.

    Args:
        path: a .ckpt or a .safetensors file, or a folder that was exported for diffusers.
        weights: the set to load; None takes EMA weights if the file has them, otherwise raw weights.
        trusted: classes outside uvit_decay, or modules, that the file may name for its network or its noise path.
    """
    stored = read(path, weights)
    card = stored.card
    net = stored.network(trusted)
    ours = card.net.is_from(HOME)
    copies = {name: value.clone(memory_format=torch.contiguous_format) for name, value in stored.state.items()}
    net.load_state_dict(copies, assign=ours)
    if ours:
        net.float()
    check_attributes(net, f"{path} describes a {type(net).__name__}")
    return Checkpoint(net.eval(), card, card.noise_path(trusted))


@dataclass(frozen=True)
class StoredModel:
    """One set of weights of a file, and its model card.

    Args:
        where: the file.
        card: its model card.
        state: the weights by name.
        not_averaged: names of weights in `state` that are raw, although the set is "ema".
        notes: lines for the user on how an official file was read.
    """

    where: Path
    card: ModelCard
    state: dict[str, Tensor]
    not_averaged: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def network(self, trusted: Sequence[str] = ()) -> nn.Module:
        """Build the network that the card describes, and check that the weights fit it; they are not loaded.

        A network of this package is built on the meta device and takes no memory. Another class must be `trusted`.
        """
        spec = self.card.net
        if spec.is_from(HOME):
            self._check_schedule(spec.init_args.get("schedule"), trusted)
        with torch.device("meta" if spec.is_from(HOME) else "cpu"):
            net = build(spec, nn.Module, HOME, trusted)
        if problem := mismatch(net, self.state):
            raise UserError(f"{self.where}: the weights do not fit the network that it describes: {problem}")
        raw = self.not_averaged & dict(net.named_parameters()).keys()
        if raw:
            raise UserError(f"{self.where} is damaged: {len(raw)} of its EMA weights are missing, such as {min(raw)}")
        return net

    def _check_schedule(self, schedule: object, trusted: Sequence[str]) -> None:
        """Import the class of connections that `schedule` names; it must be trusted, or imported already."""
        if not isinstance(schedule, str):
            return
        module = schedule.rpartition(".")[0]
        if not module:
            _check_known("schedule", schedule, SHORTCUTS, self.where)
        elif module not in sys.modules:
            find_class(schedule, Connection, HOME, trusted, self.where)


def read(path: Path, weights: Weights | None) -> StoredModel:
    """Read a checkpoint of any format; check types, checksums and finiteness, but not whether it fits the network.

    If checkpoints/digits.safetensors does not exist in the working directory, the bundled copy is read.
    """
    path = or_bundled(path)
    file = weights_file(path)
    stored = _read_exported(file) if file.suffix == ".safetensors" else _read_training(file, weights)
    if file != path:
        stored = _localise(stored, path)
    if weights not in (None, stored.card.weights):
        raise UserError(f"{path} holds {stored.card.weights} weights, not {weights}")
    check_weights(file, stored.state)
    return stored


def _localise(stored: StoredModel, folder: Path) -> StoredModel:
    """Return a model read from a folder for diffusers, with the folder's own autoencoder and our names of weights."""
    latents = stored.card.latents
    autoencoder = folder / AUTOENCODER
    if latents and autoencoder.is_dir():
        latents = replace(latents, vae=str(autoencoder.absolute()))
    card = replace(stored.card, latents=latents)
    state = {name.removeprefix(NET): value for name, value in stored.state.items()}
    return replace(stored, card=card, state=state)


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder that was exported for diffusers."""
    return (path / INDEX).is_file() and (path / WEIGHTS).is_file()


def weights_file(path: Path) -> Path:
    """Return the weights file of a checkpoint: `path` itself or, in a diffusers folder, the denoiser's weights."""
    if is_folder(path):
        return path / WEIGHTS
    return path


def _read_exported(path: Path) -> StoredModel:
    metadata, state = load_tensors(path)
    if KEY not in metadata:
        raise ThirdParty(f"{path} was not exported by this project, it looks like {looks_like(state)}")
    card = ModelCard.from_dict(parse(metadata[KEY], path), path)
    return StoredModel(path, card, state)


def _read_training(path: Path, weights: Weights | None) -> StoredModel:
    contents = read_training_checkpoint(path)
    card = ModelCard.from_dict(contents[KEY], path)
    stored = TrainingContents.parse(contents, path)
    raw = stored.network_state()
    if weights == "ema" and not stored.average:
        raise UserError(f"{path} holds no EMA weights: its run had no EMA callback")
    if weights == "raw" or not stored.average:
        return StoredModel(path, replace(card, weights="raw"), raw)
    not_averaged = frozenset(raw.keys() - stored.average.keys())
    return StoredModel(path, replace(card, weights="ema"), raw | stored.average, not_averaged)


@dataclass(frozen=True)
class TrainingContents:
    """Contents of a .ckpt of this project, apart from the model card and from what only Lightning reads.

    Args:
        state_dict: weights of the task: `net.*`, and `task.*` of its own modules.
        callbacks: state of each callback by name.
        average: averaged weights of the network by name, from the callback EMA; empty without this callback.
        settings: settings of the run, plain values by name; empty for a run of a script.
    """

    state_dict: dict[str, Tensor]
    callbacks: dict[str, object]
    average: dict[str, Tensor]
    settings: dict[str, object]

    @classmethod
    def parse(cls, contents: Mapping[str, Any], where: Path | str) -> TrainingContents:
        """Return the parts of a checkpoint; raise a UserError, which names `where`, if one has another type."""
        settings = contents.get("settings") or {}
        callbacks = contents.get("callbacks")
        with explain(f"{where} is damaged", AttributeError):
            average = callbacks.get("EMA", {}).get("shadow", {})
        values = {"state_dict": contents.get("state_dict"), "callbacks": callbacks, "average": average}
        return as_type(cls, values | {"settings": settings}, str(where))

    def network_state(self) -> dict[str, Tensor]:
        """Return the weights of the network without their prefix."""
        weights = {}
        for name, value in self.state_dict.items():
            if name.startswith(NET):
                weights[name.removeprefix(NET)] = value
        return weights


@check_types
def read_training_checkpoint(path: Path, whole: bool = True) -> dict[str, Any]:
    """Return the contents of a .ckpt of this project, checked against the checksums of its zip; see `load_pickle`."""
    if path.suffix == ".safetensors":
        raise UserError(f"{path} has weights but no optimizer: give a .ckpt of a run, such as checkpoints/last.ckpt")
    contents = load_pickle(path, whole)
    check_ours(contents, path)
    return contents


def check_ours(contents: object, where: Path | str) -> None:
    """Raise ThirdParty unless `contents` come from a .ckpt of this project."""
    if not isinstance(contents, dict) or KEY not in contents:
        raise ThirdParty(f"{where} was not written by this project, it looks like {looks_like(contents)}")
