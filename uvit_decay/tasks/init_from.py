"""The weights that a new run starts from, of this project or official, adapted to other classes, channels or sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.convert import read_official
from uvit_decay.checkpoint.detect import ThirdParty
from uvit_decay.checkpoint.io import StoredModel, is_folder, read
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.data.classes import synonyms
from uvit_decay.data.datamodule import ImageData
from uvit_decay.decay.table import SHORTCUTS
from uvit_decay.decay.weights import NAMES
from uvit_decay.files.instantiate import Spec
from uvit_decay.nn.base import DataLayers, DecayedNet, HasDataLayers
from uvit_decay.nn.embed import resize_positions
from uvit_decay.nn.layers import PUBLISHED
from uvit_decay.runs.compatibility import check_data, compare_specs
from uvit_decay.runs.settings import Change, explain_refusal
from uvit_decay.terminal.errors import UserError, name_flags, with_flags

# Arguments of networks that encoders share; of a classifier image_size, num_classes and the last norm may differ.
SHARED = ("patch_size", "channels", "dim", "depth", "heads", "width", "stem", "pixels")
LAYERS = asdict(PUBLISHED)  # arguments of transformers, with the values in files that do not record them
SHARED += ("alpha_min", "schedule", "granularity", "index", "branches", *LAYERS)
NORMS = ("norm", "fc_norm")  # between encoder and head: new ones only standardise
ADAPTED = ("net.image_size", "net.channels", "net.num_classes", "net.null_label")  # may differ in denoisers
ADAPTED += ("net.learned_variance",)  # only selects which part of the output is returned; no loss trains it
TOKENS = ("net.image_size", "net.num_classes")  # on which the number of tokens may depend
GATES = "long_skips.gates."
OUTPUT_SKIP = "output_skip"
SHORTCUT = ("net.schedule", "net.granularity", "net.index", "net.branches")


@runtime_checkable
class Classifier(Protocol):
    """Network that ends in a linear layer."""

    linear_head: nn.Linear


@dataclass(frozen=True)
class Adapted:
    """A tensor of a network whose value is not the value of the same name in the file.

    Args:
        name: its name in the network.
        value: its value; None keeps the initial value.
        note: what was done, for the printed line; empty if there is nothing to say.
    """

    name: str
    value: Tensor | None
    note: str = ""


def head_module(net: Classifier) -> str:
    """Return the name of the classifier part of `net`: the linear layer, with its batch norm if it has one."""
    names = (name for name, parameter in net.named_parameters() if parameter is net.linear_head.weight)
    return next(names).partition(".")[0]


def read_weights(path: Path) -> StoredModel:
    """Read a checkpoint of this project, with EMA weights if it has them, or an official file that needs no options."""
    if not path.is_dir() or is_folder(path):
        with suppress(ThirdParty):
            return read(path, None)
    try:
        with name_flags(_name_import_flag):
            stored = read_official(path)
            return replace(stored, notes=tuple(map(with_flags, stored.notes)))
    except UserError as error:
        raise UserError(f"{error} (for its options, see uvit-decay import --help)") from error


def _name_import_flag(name: str, _: Sequence[FrameType]) -> str | None:
    """Return the flag of `uvit-decay import` for one of its options, which other programs may have, too."""
    return f"--{name.replace('_', '-')}" if name in ImportOptions.__annotations__ else None


def read_initial(file: Path, net: nn.Module, function: Mapping[str, Any]) -> StoredModel:
    """Read the weights from which `net` is to start, EMA weights if the file has them.

    Args:
        file: a .ckpt or .safetensors of this project, or an official file. For a classifier only its encoder must
            match.
        net: the network.
        function: the trained function, see `Task.function_spec`.
    """
    stored = read_weights(file)
    refused = find_misfits(stored, net, function["net"])
    if refused:
        raise UserError(explain_refusal(str(file), refused, ()))
    stored.network([function["net"].class_path])  # raises if the weights do not fit their card
    if isinstance(net, Classifier):
        _check_encoder(stored, net)
    return stored


def find_misfits(stored: StoredModel, net: nn.Module, spec: Spec) -> list[Change]:
    """Return the arguments of a network with which it cannot take the weights of a file.

    Args:
        stored: the file.
        net: the network, on any device.
        spec: its class and arguments.
    """
    changes = compare_specs("net", stored.card.net, spec)
    if isinstance(net, Classifier):
        changes = _compare_encoders(stored, net)
    free = list(ADAPTED) if isinstance(net, HasDataLayers) else []
    own = net.state_dict()
    for name, value in stored.state.items():
        # Learned gates of long skips depend on the number of tokens.
        if GATES in name and name in own and own[name].shape != value.shape:
            free = [name for name in free if name not in TOKENS]
    if stored.card.net.init_args.get(OUTPUT_SKIP, "none") == "none":
        free.append(f"net.{OUTPUT_SKIP}")  # a new one has no effect
    if stored.card.net.init_args.get("channels") != net.channels:
        free.append("net.pixels")  # the scale of the first layer, which is new
    if isinstance(net, DecayedNet) and net.connections[0].plain and _is_plain(stored.card.net.init_args):
        free += SHORTCUT  # new connections have no effect
    found = []
    for change in changes:
        if change.name == "net":
            change = replace(change, flag="")  # another class has other options, too
        if change.name not in free:
            found.append(change)
    return found


def _is_plain(arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a network are those of plain shortcuts: alpha_min 1 of a kind that has one."""
    schedule = arguments.get("schedule", "linear")
    falls = isinstance(schedule, str) and schedule in SHORTCUTS and SHORTCUTS[schedule].falls
    return falls and arguments.get("alpha_min", 1.0) == 1.0


def _compare_encoders(stored: StoredModel, net: nn.Module) -> Iterator[Change]:
    """Yield the shared arguments of encoders that differ; a ResNet and a transformer are not compared."""
    before: Mapping[str, object] = {**LAYERS, **stored.card.net.init_args}
    if ("patch_size" in before) != ("patch_size" in net.config):
        return
    for name in SHARED:
        if name in before and name in net.config and before[name] != net.config[name]:
            yield Change(f"net.{name}", before[name], net.config[name], flag=f"model.net.{name}")


def _check_encoder(stored: StoredModel, net: Classifier) -> None:
    """Raise a UserError unless the file has the encoder of a classifier."""
    own = net.state_dict()
    new = (head_module(net), *NORMS, *NAMES)
    kind = stored.card.net.class_path.rpartition(".")[2]
    for name, value in own.items():
        if name.partition(".")[0] in new:
            continue
        problem = ""
        if name not in stored.state:
            problem = f"no {name}"
        elif name != "pos_embed" and stored.state[name].shape != value.shape:  # positions are interpolated
            problem = f"{name} of another shape"
        if problem:
            own_kind = type(net).__name__
            raise UserError(f"{stored.where} is of a {kind} with {problem}: it has no encoder of this {own_kind}")
    if "norm.weight" in stored.state and not any(f"{norm}.weight" in own for norm in NORMS):
        raise UserError(f"{stored.where} has a norm after its last block, this network has none: set `norm` to true")


def adapt(net: nn.Module, stored: StoredModel, function: Mapping[str, Any], data: ImageData) -> list[str]:
    """Load the weights of `read_initial` into `net`, and return lines to print: which were taken and which are new.

    A warning precedes them if the weights were trained for another path or prediction, or in another latent space.

    The head of a classifier is always new, and a decoder is left out. First and last layers are new for other channels.
    Learned positions are interpolated for another image size, fixed ones are the network's own. Rows of the label table
    are taken for classes of equal names and for the null label.

    Args:
        net: the network, as it was initialised.
        stored: the weights and their card.
        function: the trained function, see `Task.function_spec`.
        data: the data, set up; their classes are known by name.
    """
    # 1. Tensors that depend on the data change: `value` is what the network gets, None what it keeps as initialised.
    own = net.state_dict()
    theirs = stored.network([stored.card.net.class_path])
    layers = DataLayers((), ())
    if isinstance(net, Classifier):
        positions = ("pos_embed",) if "pos_embed" in own else ()
        layers = DataLayers((head_module(net),), positions)
    elif isinstance(net, HasDataLayers):
        layers = net.data_layers
    adapted = [
        *_renew_pixels(net, theirs, layers),
        *_adapt_positions(net, theirs, stored.state, layers),
        *_adapt_labels(net, theirs, stored, layers, data.class_names),
    ]
    state: dict[str, Tensor | None] = dict(stored.state)
    notes = {}
    for tensor in adapted:
        state[tensor.name] = tensor.value
        if tensor.note:
            notes[tensor.name] = tensor.note
    # 2. All other tensors are taken by name; names that the file lacks stay new, such as the decoder of an MAE.
    taken = {name: state[name] for name in own if state.get(name) is not None}
    net.load_state_dict(taken, strict=False)
    # 3. One line says what was taken.
    card = stored.card
    kind = card.net.class_path.rpartition(".")[2]
    parts = [f"{len(taken)} tensors from {stored.where} ({kind}, {card.weights} weights of step {card.step})"]
    parts += [f"{name} {note}" for name, note in notes.items()]
    new = [name for name in own if name not in (*taken, *notes, *NAMES)]
    parts.append(f"new: {', '.join(new) or 'nothing'}")
    left_out = {name.partition(".")[0] for name in stored.state.keys() - own.keys()}
    if left_out:
        parts.append(f"left out: {', '.join(sorted(left_out))}")
    return [*stored.notes, *_warn_of_other_training(stored, function, data), "; ".join(parts)]


def _renew_pixels(net: nn.Module, theirs: nn.Module, layers: DataLayers) -> Iterator[Adapted]:
    """Yield the weights that stay new: for other channels the first and last layers, and the head of a classifier."""
    if theirs.channels == net.channels and not isinstance(net, Classifier):
        return
    prefixes = tuple(f"{module}." for module in layers.pixels)
    for name in net.state_dict():
        if name.startswith(prefixes):
            yield Adapted(name, None)


def _adapt_positions(
    net: nn.Module, theirs: nn.Module, state: Mapping[str, Tensor], layers: DataLayers
) -> Iterator[Adapted]:
    """Yield positions for another image size, or for other prefix tokens; the last prefix tokens are shared.

    Fixed positions are computed, except that a classifier takes its encoder's positions and interpolates them (MAE).
    """
    parameters = dict(net.named_parameters())
    for name in layers.positions:
        own = parameters[name].detach()
        value = state[name].float()
        side = math.isqrt(own.shape[1] - net.num_prefix_tokens)
        before = math.isqrt(value.shape[1] - theirs.num_prefix_tokens)
        is_fixed = not (parameters[name].requires_grad or isinstance(net, Classifier))
        if side != before and is_fixed:
            yield Adapted(name, None, f"computed for {side}x{side} patches")
            continue
        prefix = min(net.num_prefix_tokens, theirs.num_prefix_tokens)
        value = resize_positions(value[:, theirs.num_prefix_tokens - prefix :], prefix, side)
        fresh = own[:, : net.num_prefix_tokens - prefix]
        notes = []
        if fresh.shape[1]:
            notes.append("with a new one for the label")
        if side != before:
            notes.append(f"interpolated from {before}x{before} to {side}x{side} patches")
        yield Adapted(name, torch.cat([fresh, value], dim=1), " and ".join(notes))


def _adapt_labels(
    net: nn.Module, theirs: nn.Module, stored: StoredModel, layers: DataLayers, class_names: Sequence[str]
) -> Iterator[Adapted]:
    """Yield the adapted label table, or the bias that replaces it."""
    if layers.labels is None or layers.labels not in stored.state:
        return
    table = stored.state[layers.labels].float()
    if not net.num_classes:
        if theirs.null_label and layers.label_bias:
            bias = stored.state[layers.label_bias].float() + table[theirs.num_classes]
            yield Adapted(layers.label_bias, bias, "plus the vector of the null label")
        return
    rows, how = _match_classes(stored, net.num_classes, class_names)
    is_complete = len(rows) == net.num_classes
    parts = []
    if rows and not is_complete:
        parts.append(f"{len(rows)} of {net.num_classes} classes ({how})")
    if net.null_label and theirs.null_label:
        rows[net.num_classes] = theirs.num_classes
        parts.append("the null label")
    if not rows:
        yield Adapted(layers.labels, None)
        return
    value = net.state_dict()[layers.labels].clone()
    value[list(rows)] = table[list(rows.values())]
    yield Adapted(layers.labels, value, "" if is_complete else f"of {' and '.join(parts)}")


def _match_classes(stored: StoredModel, count: int, class_names: Sequence[str]) -> tuple[dict[int, int], str]:
    """Return the rows of classes that a file knows, {row here: row in the file}, and how they were matched.

    Classes match by equal names, or by words for ImageNet's ids. An official file may have only numbers: its classes
    match by number if the number of classes is equal.
    """
    card = stored.card
    rows: dict[int, int] = {}
    if card.class_hash is None:
        if len(card.class_names) == count:
            rows = {row: row for row in range(count)}
        return rows, "by number"
    known: dict[str | tuple[str, ...], int] = {}
    for row, name in enumerate(card.class_names):
        known[name] = row
        known[synonyms(name)] = row
    for row, name in enumerate(class_names):
        key = name if name in known else synonyms(name)
        if key in known:
            rows[row] = known[key]
    return rows, "by name"


def _warn_of_other_training(stored: StoredModel, function: Mapping[str, Any], data: ImageData) -> Iterator[str]:
    """Yield a warning if weights were trained for another path or prediction, or in another latent space."""
    found = []
    for part in ("path", "prediction"):
        if part in function:
            found += map(str, compare_specs(part, getattr(stored.card, part), function[part]))
    try:
        check_data(stored.card, data, conditional=False)
    except UserError as error:
        found.append(str(error))
    if found:
        yield f"warning: {stored.where} was trained for something else, to be relearned: {', '.join(found)}"
