"""Weights that a run starts from, and the classifier that takes those of an encoder by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn

from uvit_decay.checkpoint.card import ModelCard
from uvit_decay.checkpoint.convert import read_official
from uvit_decay.checkpoint.detect import ThirdParty
from uvit_decay.checkpoint.folders import is_folder
from uvit_decay.checkpoint.io import StoredModel, read
from uvit_decay.nn.embed import resized_positions
from uvit_decay.runtime.errors import UserError

# Arguments of networks that their encoders share; image_size, num_classes and the norm before the head may differ.
SHARED = ("patch_size", "channels", "dim", "depth", "heads", "mlp_ratio", "width", "stem", "pixels")
SHARED += ("alpha_min", "schedule", "granularity", "index", "branches", "qk_norm", "norm_type")
BEFORE = {"qk_norm": False, "norm_type": "layer"}  # of transformers whose files do not record them
NORMS = ("norm", "fc_norm")  # between encoder and head: new ones only standardise


@runtime_checkable
class Classifier(Protocol):
    """Network that ends in a linear layer."""

    linear_head: nn.Linear


def start_from(net: nn.Module, file: Path) -> str:
    """Load the weights of an encoder into `net`, and return one line that says what was taken and what is new.

    The head is always new; a decoder is left out; positions are interpolated for another image size.

    Args:
        net: a classifier with `linear_head` and `config`.
        file: a .ckpt or .safetensors of this project, of an MAE or of a network of the class of `net`, EMA weights if
            it has them, or an official file.

    Raises:
        UserError: a file that cannot be read, of another architecture or another decay.
    """
    stored = read_weights(file)
    stored.check()
    _check_architecture(stored, net)
    own, head = net.state_dict(), head_module(net)
    taken = {name: v for name, v in stored.state.items() if name in own and name.partition(".")[0] != head}
    new = [name for name in own if name not in taken and name not in ("alphas", "betas")]
    absent = [name for name in new if name.partition(".")[0] not in (head, *NORMS)]
    if "pos_embed" in taken and not absent:
        side = math.isqrt(own["pos_embed"].shape[1] - net.num_prefix_tokens)
        taken["pos_embed"] = resized_positions(taken["pos_embed"].float(), net.num_prefix_tokens, side)
    wrong = [name for name, value in taken.items() if value.shape != own[name].shape]
    if absent or wrong:
        kind = stored.card.net.class_path.rpartition(".")[2]
        what = f"no {absent[0]}" if absent else f"{wrong[0]} of another shape"
        raise UserError(f"{file} is of a {kind} with {what}: it has no encoder of this {type(net).__name__}")
    if "norm.weight" in stored.state and not any(f"{norm}.weight" in own for norm in NORMS):
        raise UserError(f"{file} has a norm after its last block, this network none: set --model.net.norm true")
    net.load_state_dict(taken, strict=False)  # checks the alphas
    return "\n".join([*stored.notes, summary(stored, taken, new, stored.state.keys() - taken.keys())])


def read_weights(path: Path) -> StoredModel:
    """Read a checkpoint of this project, EMA weights if it has them, or an official file that needs no options."""
    if path.is_dir() and not is_folder(path):
        return _published(path)
    try:
        return read(path, None)
    except ThirdParty:
        return _published(path)


def _published(path: Path) -> StoredModel:
    try:
        return read_official(path)
    except UserError as error:
        raise UserError(f"{error} (options are those of python -m uvit_decay.checkpoint import)") from error


def head_module(net: nn.Module) -> str:
    """Return the name of the part of `net` that is its classifier: the linear layer, with its batch norm if any."""
    weight = next(name for name, p in net.named_parameters() if p is net.linear_head.weight)
    return weight.partition(".")[0]


def _check_architecture(stored: StoredModel, net: nn.Module) -> None:
    """Raise a UserError with all flags to set if arguments that encoders share differ."""
    before: Mapping[str, object] = {**BEFORE, **stored.card.net.init_args}
    if ("patch_size" in before) != ("patch_size" in net.config):
        return  # a ResNet and a transformer: their tensors tell
    names = [name for name in SHARED if name in before and name in net.config and before[name] != net.config[name]]
    if names:
        theirs = ", ".join(f"net.{name} {before[name]}" for name in names)
        ours = ", ".join(str(net.config[name]) for name in names)
        flags = " ".join(f"--model.net.{name} {before[name]}" for name in names)
        raise UserError(f"{stored.where} was trained with {theirs}, this network has {ours}: set {flags}")


def summary(
    stored: StoredModel,
    taken: Collection[str],
    new: Sequence[str],
    left_out: Collection[str],
    notes: Sequence[str] = (),
) -> str:
    """Return one line on a network that starts from a file: names of weights, and `notes` on how they were taken."""
    parts = [f"{len(taken)} tensors from {stored.where} ({origin(stored.card)})", *notes]
    parts.append(f"new: {', '.join(new) or 'nothing'}")
    if left_out:
        parts.append(f"left out: {', '.join(sorted({name.partition('.')[0] for name in left_out}))}")
    return "; ".join(parts)


def origin(card: ModelCard) -> str:
    """Return the class of a network, and which of its weights these are."""
    return f"{card.net.class_path.rpartition('.')[2]}, {card.weights} weights of step {card.step}"
