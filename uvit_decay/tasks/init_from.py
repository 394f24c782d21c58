"""The weights that a new run starts from: of this project or official, for other classes, channels or sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.convert import read_official
from uvit_decay.checkpoint.detect import ThirdParty
from uvit_decay.checkpoint.io import StoredModel, is_folder, read
from uvit_decay.class_names import synonyms
from uvit_decay.data.datamodule import ImageData
from uvit_decay.decay.table import NAMES
from uvit_decay.nn.base import DataLayers, HasDataLayers
from uvit_decay.nn.embed import resize_positions
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.resumption.check import check_data, part_differences
from uvit_decay.tasks.resumption.settings import Change, refusal

# Arguments of networks that encoders share; of a classifier image_size, num_classes and the last norm may differ.
SHARED = ("patch_size", "channels", "dim", "depth", "heads", "mlp_ratio", "width", "stem", "pixels")
SHARED += ("alpha_min", "schedule", "granularity", "index", "branches", "qk_norm", "norm_type")
BEFORE = {"qk_norm": False, "norm_type": "layer"}  # of transformers whose files do not record them
NORMS = ("norm", "fc_norm")  # between encoder and head: new ones only standardise
ADAPTED = ("net.image_size", "net.channels", "net.num_classes", "net.null_label")  # of denoisers, which may differ
ADAPTED += ("net.learned_variance",)  # which only says what of the output is returned, and which no loss trains
State = Mapping[str, Tensor]
Adapted = tuple[str, Tensor | None, str]  # name, value (None: as it was initialised), note if there is something to say


@runtime_checkable
class Classifier(Protocol):
    """Network that ends in a linear layer."""

    linear_head: nn.Linear


def head_module(net: Classifier) -> str:
    """Return the name of the part of `net` that is its classifier: the linear layer, with its batch norm if any."""
    weight = next(name for name, p in net.named_parameters() if p is net.linear_head.weight)
    return weight.partition(".")[0]


def read_weights(path: Path) -> StoredModel:
    """Read a checkpoint of this project, EMA weights if it has them, or an official file that needs no options."""
    if not path.is_dir() or is_folder(path):
        with suppress(ThirdParty):
            return read(path, None)
    try:
        return read_official(path)
    except UserError as error:
        raise UserError(f"{error} (options are those of uvit-decay import)") from error


def read_initial(file: Path, net: nn.Module, function: Mapping[str, Any]) -> StoredModel:
    """Read the weights from which `net` is to start, EMA weights if the file has them.

    Args:
        file: a .ckpt or .safetensors of this project, or an official file; for a classifier it need only have its
            encoder.
        net: the network.
        function: what the task trains, see `Task.function_spec`.

    Raises:
        UserError: a file that cannot be read, or of a network with arguments that must be equal and are not.
    """
    stored = read_weights(file)
    classifies = isinstance(net, Classifier)
    pair = stored.card.net, function["net"]
    found = _encoder_differences(stored, net) if classifies else part_differences("net", *pair)
    free = list(ADAPTED) if isinstance(net, HasDataLayers) else []
    if stored.card.net.init_args.get("channels") != net.channels:
        free.append("net.pixels")  # the scale of the first layer, which is new
    refused = [Change(*change, "" if change[0] == "net" else f"model.{change[0]}") for change in found]
    if refused := [change for change in refused if change.name not in free]:
        raise UserError(refusal(str(file), refused, ()))
    stored.network([function["net"].class_path])  # raises if the weights do not fit their card
    if classifies:
        _check_encoder(stored, net)
    return stored


def _encoder_differences(stored: StoredModel, net: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the arguments that encoders share and that differ; those of a ResNet and a transformer are not compared."""
    before: Mapping[str, object] = {**BEFORE, **stored.card.net.init_args}
    if ("patch_size" in before) == ("patch_size" in net.config):
        for name in SHARED:
            if name in before and name in net.config and before[name] != net.config[name]:
                yield f"net.{name}", before[name], net.config[name]


def _check_encoder(stored: StoredModel, net: Classifier) -> None:
    """Raise a UserError unless the file has the encoder of a classifier."""
    own, new = net.state_dict(), (head_module(net), *NORMS, *NAMES)
    encoder = {name: value for name, value in own.items() if name.partition(".")[0] not in new}
    absent = [name for name in encoder if name not in stored.state]
    # positions of an image size are interpolated
    wrong = [name for name in encoder.keys() - {"pos_embed", *absent} if stored.state[name].shape != own[name].shape]
    if absent or wrong:
        kind = stored.card.net.class_path.rpartition(".")[2]
        what = f"no {absent[0]}" if absent else f"{wrong[0]} of another shape"
        raise UserError(f"{stored.where} is of a {kind} with {what}: it has no encoder of this {type(net).__name__}")
    if "norm.weight" in stored.state and not any(f"{norm}.weight" in own for norm in NORMS):
        raise UserError(f"{stored.where} has a norm after its last block, this network none: set --model.net.norm true")


def adapt(net: nn.Module, stored: StoredModel, function: Mapping[str, Any], data: ImageData) -> list[str]:
    """Load the weights of `read_initial` into `net`, and return one line that says what was taken and what is new.

    A warning precedes it if they were trained for another path or prediction, or in another latent space.

    The head of a classifier is always new, and a decoder is left out. First and last layers are new for other channels.
    Learned positions are interpolated for another image size, fixed ones are the network's own. Rows of the label table
    are taken for classes of equal names and for the null label.

    Args:
        net: the network, as it was initialised.
        stored: the weights and their card.
        function: what the task trains, see `Task.function_spec`.
        data: the data, set up; their classes are known by name.
    """
    own, theirs = net.state_dict(), stored.network([stored.card.net.class_path])
    layers = net.data_layers if isinstance(net, HasDataLayers) else DataLayers((), ())
    if isinstance(net, Classifier):
        layers = DataLayers((head_module(net),), ("pos_embed",) if "pos_embed" in own else ())
    adapted = [*_pixels(net, theirs, layers), *_positions(net, theirs, stored.state, layers)]
    adapted += _labels(net, theirs, stored, layers, data.class_names)
    state = stored.state | {name: value for name, value, _ in adapted}
    taken = {name: state[name] for name in own if state.get(name) is not None}
    notes = {name: note for name, _, note in adapted if note}
    net.load_state_dict(taken, strict=False)
    card, kind = stored.card, stored.card.net.class_path.rpartition(".")[2]
    weights = f"{kind}, {card.weights} weights of step {card.step}"
    parts = [f"{len(taken)} tensors from {stored.where} ({weights})", *map(" ".join, notes.items())]
    new = [name for name in own if name not in (*taken, *notes, *NAMES)]
    parts.append(f"new: {', '.join(new) or 'nothing'}")
    if left_out := sorted({name.partition(".")[0] for name in stored.state.keys() - own.keys()}):
        parts.append(f"left out: {', '.join(left_out)}")
    return [*stored.notes, *_other_training(stored, function, data), "; ".join(parts)]


def _pixels(net: nn.Module, theirs: nn.Module, layers: DataLayers) -> Iterator[Adapted]:
    """Yield the weights of layers that read or write channels, which are new for other channels, or of a new head."""
    if theirs.channels != net.channels or isinstance(net, Classifier):
        prefixes = tuple(f"{module}." for module in layers.pixels)
        yield from ((name, None, "") for name in net.state_dict() if name.startswith(prefixes))


def _positions(net: nn.Module, theirs: nn.Module, state: State, layers: DataLayers) -> Iterator[Adapted]:
    """Yield positions for another image size, or for other prefix tokens; the last ones are what both have.

    Fixed positions are computed, but those of a classifier are those of its encoder, and interpolated (MAE).
    """
    parameters = dict(net.named_parameters())
    for name in layers.positions:
        own, value = parameters[name].detach(), state[name].float()
        side = math.isqrt(own.shape[1] - net.num_prefix_tokens)
        before = math.isqrt(value.shape[1] - theirs.num_prefix_tokens)
        resized = f"{before}x{before} to {side}x{side} patches"
        if side != before and not (parameters[name].requires_grad or isinstance(net, Classifier)):
            yield name, None, f"computed for {side}x{side} patches"
            continue
        prefix = min(net.num_prefix_tokens, theirs.num_prefix_tokens)
        value = resize_positions(value[:, theirs.num_prefix_tokens - prefix :], prefix, side)
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
