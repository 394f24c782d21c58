"""The weights that a new run starts from: of this project or official, for other classes, channels or sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.card import ModelCard
from uvit_decay.checkpoint.convert import read_official
from uvit_decay.checkpoint.detect import ThirdParty
from uvit_decay.checkpoint.io import StoredModel, is_folder, read
from uvit_decay.class_names import synonyms
from uvit_decay.data.datamodule import ImageData
from uvit_decay.nn.base import DataLayers, HasDataLayers
from uvit_decay.nn.embed import resized_positions
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.resume import check_data, part_differences
from uvit_decay.tasks.settings import Change, refusal

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


ADAPTED = ("net.image_size", "net.channels", "net.num_classes", "net.null_label")  # settings that may differ
ADAPTED += ("net.learned_variance",)  # which only says what of the output is returned, and which no loss trains
NOTHING = DataLayers((), ())
State = Mapping[str, Tensor]
Adapted = tuple[str, Tensor | None, str]  # name, value (None: as it was initialised), note if there is something to say


def read_initial(file: Path, net: nn.Module, function: Mapping[str, Any]) -> StoredModel:
    """Read the weights from which `net` is to start, EMA weights if the file has them.

    Args:
        file: a .ckpt or .safetensors of this project, or an official file of U-ViT, SiT, DiT or MAE.
        net: the network.
        function: what the task trains, see `Task.function_spec`.

    Raises:
        UserError: a file that cannot be read, or of a network with arguments that must be equal and are not.
    """
    stored = read_weights(file)
    free = list(ADAPTED) if isinstance(net, HasDataLayers) else []
    if stored.card.net.init_args.get("channels") != net.channels:
        free.append("net.pixels")  # the scale of the first layer, which is new
    found = part_differences("net", stored.card.net, function["net"])
    refused = [Change(*change, "" if change[0] == "net" else f"model.{change[0]}") for change in found]
    if refused := [change for change in refused if change.name not in free]:
        raise UserError(refusal(str(file), refused, ()))
    stored.network([function["net"].class_path])  # raises if the weights do not fit their card
    return stored


def adapt(net: nn.Module, stored: StoredModel, function: Mapping[str, Any], data: ImageData) -> list[str]:
    """Load the weights of `read_initial` into `net`, and return one line that says what was taken and what is new.

    A warning precedes it if they were trained for another path or prediction, or in another latent space.

    First and last layers are new for other channels. Learned positions are interpolated for another image size, fixed
    ones are the network's own. Rows of the label table are taken for classes of equal names and for the null label.

    Args:
        net: the network, as it was initialised.
        stored: the weights and their card.
        function: what the task trains, see `Task.function_spec`.
        data: the data, set up; their classes are known by name.
    """
    layers = net.data_layers if isinstance(net, HasDataLayers) else NOTHING
    theirs, own = stored.network([stored.card.net.class_path]), net.state_dict()
    adapted = [*_pixels(net, theirs, layers), *_positions(net, theirs, stored.state, layers)]
    adapted += _labels(net, theirs, stored, layers, data.class_names)
    state = stored.state | {name: value for name, value, _ in adapted}
    taken = {name: state[name] for name in own if state.get(name) is not None}
    notes = {name: note for name, _, note in adapted if note}
    new = [name for name in own if name not in (*taken, *notes, "alphas", "betas")]
    net.load_state_dict(taken, strict=False)
    left_out, how = stored.state.keys() - own.keys(), [f"{name} {note}" for name, note in notes.items()]
    return [*stored.notes, *_other_training(stored, function, data), summary(stored, taken, new, left_out, how)]


def _pixels(net: nn.Module, theirs: nn.Module, layers: DataLayers) -> Iterator[Adapted]:
    """Yield the weights of layers that read or write channels, which are new for other channels."""
    if theirs.channels != net.channels:
        prefixes = tuple(f"{module}." for module in layers.pixels)
        yield from ((name, None, "") for name in net.state_dict() if name.startswith(prefixes))


def _positions(net: nn.Module, theirs: nn.Module, state: State, layers: DataLayers) -> Iterator[Adapted]:
    """Yield positions for another image size, or for other prefix tokens; the last ones are what both have."""
    parameters = dict(net.named_parameters())
    for name in layers.positions:
        own, value = parameters[name].detach(), state[name].float()
        side = math.isqrt(own.shape[1] - net.num_prefix_tokens)
        before = math.isqrt(value.shape[1] - theirs.num_prefix_tokens)
        resized = f"{before}x{before} to {side}x{side} patches"
        if side != before and not parameters[name].requires_grad:
            yield name, None, f"computed for {side}x{side} patches"
            continue
        prefix = min(net.num_prefix_tokens, theirs.num_prefix_tokens)
        value = resized_positions(value[:, theirs.num_prefix_tokens - prefix :], prefix, side)
        fresh = own[:, : net.num_prefix_tokens - prefix]
        notes = ["with a new one for the label"] if fresh.shape[1] else []
        notes += [f"interpolated from {resized}"] if side != before else []
        yield name, torch.cat([fresh, value], dim=1), " and ".join(notes)


def _labels(
    net: nn.Module, theirs: nn.Module, stored: StoredModel, layers: DataLayers, class_names: Sequence[str]
) -> Iterator[Adapted]:
    """Yield the adapted label table, or the bias that replaces it."""
    if layers.labels is None or layers.labels not in stored.state:
        return
    table = stored.state[layers.labels].float()
    if not net.num_classes:
        if theirs.null_label and layers.label_bias:
            bias = stored.state[layers.label_bias].float() + table[theirs.num_classes]
            yield layers.label_bias, bias, "plus the vector of the null label"
        return
    rows, how = _known_classes(stored, net.num_classes, class_names)
    parts = [f"{len(rows)} of {net.num_classes} classes ({how})"] if 0 < len(rows) < net.num_classes else []
    complete = len(rows) == net.num_classes
    if net.null_label and theirs.null_label:
        rows[net.num_classes] = theirs.num_classes
        parts.append("the null label")
    if rows:
        value = net.state_dict()[layers.labels].clone()
        value[list(rows)] = table[list(rows.values())]
        yield layers.labels, value, "" if complete else f"of {' and '.join(parts)}"
    else:
        yield layers.labels, None, ""


def _known_classes(stored: StoredModel, count: int, class_names: Sequence[str]) -> tuple[dict[int, int], str]:
    """Return the rows of classes that a file knows, {ours: its}, and how they were found.

    Classes are those of equal names, or words for ImageNet's ids. An official file may have only numbers: its classes
    are ours if they are as many.
    """
    card = stored.card
    if card.class_hash is not None:
        known: dict[str | tuple[str, ...], int] = {}
        for row, name in enumerate(card.class_names):
            known |= {name: row, synonyms(name): row}
        keys = (name if name in known else synonyms(name) for name in class_names)
        return {row: known[key] for row, key in enumerate(keys) if key in known}, "by name"
    same = len(card.class_names) == count
    return {row: row for row in range(count if same else 0)}, "by number"


def _other_training(stored: StoredModel, function: Mapping[str, Any], data: ImageData) -> Iterator[str]:
    """Yield a warning if weights were trained for another path or prediction, or in another latent space."""
    card = stored.card
    parts = ((part, getattr(card, part), function[part]) for part in ("path", "prediction") if part in function)
    found = [str(Change(*change)) for part in parts for change in part_differences(*part)]
    try:
        check_data(card, data, conditional=False)
    except UserError as error:
        found.append(str(error))
    if found:
        yield f"warning: {stored.where} was trained for something else, to be relearned: {', '.join(found)}"
