"""Export of this project's checkpoints, and import of official files of U-ViT, SiT, DiT and MAE.

An official file is a state_dict without a model card. Names and shapes determine the sizes; the published
configurations supply the rest (heads, null label, path, sampling) unless the caller's `ImportOptions` do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.detect import DIFFUSERS_DIT, KEY, MAE_FILE, SIT, UVIT, VIT_FILE, looks_like, read_third_party
from uvit_decay.checkpoint.io import HOME, ModelCard, StoredModel, read
from uvit_decay.checkpoint.official import diffusers_dit, mae, sit, uvit
from uvit_decay.checkpoint.official.common import IMPORTED, RecognisedModel, StateDict
from uvit_decay.checkpoint.official.entries import open_entry
from uvit_decay.checkpoint.official.timm import python_lines, timm_state
from uvit_decay.checkpoint.options import ImportOptions, Weights
from uvit_decay.data.classes import class_hash, ordered_class_list
from uvit_decay.files.tensor_files import check_weights, load_pickle, save_tensors
from uvit_decay.files.writing import check_writable, claim_paths, replacing
from uvit_decay.nn.mae import MAE
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.nn.vit import ViT
from uvit_decay.terminal.errors import UserError, with_flags
from uvit_decay.terminal.typed import check_types


class Family(NamedTuple):
    """A family of official files."""

    name: str  # for messages
    net: type[nn.Module]
    recognise: Callable[[StateDict, ImportOptions], RecognisedModel]
    options: tuple[str, ...]  # names of the `ImportOptions` that apply
    entry: str | None = None  # key of the state_dict in its file; None for a bare state_dict


ENCODER = ("heads", "alpha_min", "pixels")
DENOISER = ("heads", "num_classes", "path", "prediction", "alpha_min", "vae", "classes")
FAMILIES = {  # by the result of `looks_like`
    UVIT: Family("U-ViT", UViT, uvit.recognise, DENOISER),
    SIT: Family("SiT", SiT, sit.recognise, DENOISER),
    DIFFUSERS_DIT: Family("DiT of diffusers", SiT, diffusers_dit.recognise, DENOISER),
    MAE_FILE: Family("masked autoencoder", MAE, mae.recognise, (*ENCODER, "decoder_heads", "norm_pix"), mae.ENTRY),
    VIT_FILE: Family("vision transformer", ViT, mae.recognise_encoder, (*ENCODER, "num_classes", "classes"), mae.ENTRY),
}
OFFICIAL_FILES: dict[Weights, str] = {"ema": "nnet_ema.pth", "raw": "nnet.pth"}
StoredType = Literal["float32", "bfloat16"]
WEIGHTS_ALONE = "an official file holds weights alone: keep a .safetensors too, which has the settings of the network"


@check_types
def export_file(
    source: Path,
    target: Path,
    weights: Weights | None = None,
    *,
    to: Literal["timm"] | None = None,
    dtype: StoredType = "float32",
    trusted: Sequence[str] = (),
) -> str:
    """Write one set of weights of a checkpoint to a file, as `uvit-decay export` does.

    Args:
        source: a checkpoint of this project.
        target: a .safetensors file of this project, or an official .pth or .pt file.
        weights: the set of weights; None takes EMA weights if the checkpoint has them.
        to: "timm": write a state_dict of timm instead, in any of the three formats.
        dtype: type of the parameters; bfloat16 only for .safetensors files of this project.
        trusted: modules that register what the checkpoint names, such as its schedule.

    Returns:
        Notes for the user: what the file lacks, or how timm reads it.
    """
    with _target(source, target, (".safetensors", ".pth", ".pt")):
        stored = read(source, weights)
        if target.suffix == ".safetensors" and not to:
            return _write_ours(target, stored, dtype, source, trusted)
        if dtype == "bfloat16":
            raise UserError(f"`dtype` bfloat16 is for .safetensors files of this project, got {target}")
        net = stored.network(trusted)
        if to:
            notes = [_write_timm(target, stored, net)]
        else:
            _write_official(target, stored, net)
            notes = [WEIGHTS_ALONE]
        if isinstance(net, MAE | ViT) and stored.card.data.startswith(IMPORTED):
            notes.append(mae.LICENCE)
        return with_flags("\n".join(notes))


def _write_ours(target: Path, stored: StoredModel, dtype: StoredType, source: Path, trusted: Sequence[str]) -> str:
    """Write a .safetensors file of this project and return a note, which may be empty."""
    state = stored.state
    if stored.card.net.is_from(HOME):
        net = stored.network(trusted)  # checks that the weights fit
        if dtype == "bfloat16":  # buffers, such as recorded alphas, keep their type
            state = dict(state)
            for name, _ in net.named_parameters():
                if name in state:
                    state[name] = state[name].bfloat16()
    elif dtype == "bfloat16":  # a class from elsewhere is not built
        raise UserError(f"`dtype` bfloat16: {source} has a network that is not part of uvit_decay")
    _write(target, stored.card, state)
    latents = stored.card.latents
    if latents is None or not Path(latents.vae).is_absolute():
        return ""
    return with_flags(f"its autoencoder is a folder of this machine, {latents.vae}: elsewhere name one with `vae`")


def _write_timm(target: Path, stored: StoredModel, net: nn.Module) -> str:
    """Write a state_dict of timm and return the lines of Python that read it."""
    state = timm_state(net, stored.state, stored.where)
    if target.suffix == ".safetensors":
        save_tensors(target, state)
    else:
        _save(target, state)
    return python_lines(net, state, target)


def _write_official(target: Path, stored: StoredModel, net: nn.Module) -> None:
    """Write the weights in the official layout."""
    state = official_state(net, stored.state, stored.where)
    if isinstance(net, MAE):
        state |= mae.unread_skips(net, state)
    entry = _find_family(net, stored.where).entry
    if entry:
        _save(target, {entry: state})
    else:
        _save(target, state)


def _save(target: Path, contents: Mapping[str, Any]) -> None:
    with replacing(target) as file:
        torch.save(contents, file)


@check_types
def import_official(
    source: Path,
    target: Path,
    weights: Weights | None = None,
    options: ImportOptions = ImportOptions(),  # noqa: B008  frozen
) -> str:
    """Turn an official file into a checkpoint of this project, as `uvit-decay import` does.

    Args:
        source: an official file, or a folder of U-ViT's code or of a DiT of diffusers.
        target: the .safetensors file to write.
        weights: the set of weights; None takes EMA weights, except from nnet.pth.
        options: settings that the file does not determine.

    Returns:
        Notes for the user: what was recognised, and restrictions.
    """
    with _target(source, target, (".safetensors",)):
        stored = read_official(source, weights, options)
        _write(target, stored.card, stored.state)
        return with_flags("\n".join(stored.notes))


def read_official(
    source: Path,
    weights: Weights | None = None,
    options: ImportOptions = ImportOptions(),  # noqa: B008  frozen
) -> StoredModel:
    """Read an official file as a checkpoint of this project; see `import_official`."""
    if weights is None and source.name == OFFICIAL_FILES["raw"]:
        weights = "raw"
    file = source
    if source.is_dir():
        file = _weights_file(source, weights or "ema")
    opened = open_entry(read_third_party(file), weights, options.entry, file)
    if isinstance(opened.state, Mapping) and file.suffix != ".json":  # shards were checked one by one
        check_weights(file, {name: value for name, value in opened.state.items() if isinstance(value, Tensor)})
    model = recognise(opened.state, options, file, opened.arguments)
    if options.classes is not None:
        model = _name_classes(model, options.classes, file)
    step = opened.step
    recorded = file
    if (source / "step.pth").is_file():
        recorded = source / "step.pth"
        step = load_pickle(recorded)
    if type(step) is not int:
        raise UserError(f"the step in {recorded} should be a number, it looks like {looks_like(step)}")
    card = model.card(source.name, step, opened.weights or weights)
    if model.class_names is not None:
        card = replace(card, class_hash=class_hash(model.class_names))
    alphas = torch.tensor(model.net.shortcuts.alphas)  # a loader compares them
    origin = f"{card.weights} weights"
    if opened.entry:
        origin += f" from its entry {opened.entry},"
    summary = f"recognised {model.summary()}, {origin} of step {step}"
    return StoredModel(source, card, {**model.state, "alphas": alphas}, notes=(summary, *opened.notes, *model.notes))


def _name_classes(model: RecognisedModel, classes: str, where: Path) -> RecognisedModel:
    """Return the model with the class names of the list `classes`, see `ImportOptions`."""
    names = ordered_class_list(classes)
    count = model.net.num_classes
    if len(names) != count:
        raise UserError(f"{where} has {count} classes, `classes` {classes} names {len(names)}")
    return replace(model, class_names=names)


def _weights_file(folder: Path, weights: Weights) -> Path:
    """Return the weights file in the folder of a U-ViT or of a DiT of diffusers."""
    file = diffusers_dit.weights_file(folder) or folder / OFFICIAL_FILES[weights]
    if not file.is_file():
        raise UserError(
            f"{folder} holds no {file.name}: give a folder <step>.ckpt of U-ViT's code, a DiT of diffusers, or a file"
        )
    return file


@contextmanager
def _target(source: Path, target: Path, suffixes: tuple[str, ...]) -> Iterator[None]:
    """Check that `target` can be written, and lock it against other programs within the context."""
    if target.suffix not in suffixes:
        raise UserError(f"the file to write must end in {' or '.join(suffixes)}, got {target}")
    if os.path.realpath(source) == os.path.realpath(target):  # realpath accepts a link to itself, unlike resolve
        raise UserError(f"{target} would replace the file that is read: write to another one")
    check_writable(target)
    with claim_paths(target):
        yield


def _write(target: Path, card: ModelCard, state: Mapping[str, Tensor]) -> None:
    save_tensors(target, state, {KEY: json.dumps(card.to_dict())})


def recognise(
    contents: Any, options: ImportOptions, where: Path, arguments: Mapping[str, Any] | None = None
) -> RecognisedModel:
    """Return the network of an official state_dict.

    Args:
        contents: the state_dict.
        options: settings that the file does not determine.
        where: path of the file, for error messages.
        arguments: the recorded arguments of the training run.
    """
    kind = looks_like(contents)
    if kind not in FAMILIES:
        raise UserError(
            f"{where} is not an official U-ViT, SiT, DiT or MAE, it looks like {kind}; if the network is one part of "
            "the file, name it with `entry`"
        )
    family = FAMILIES[kind]
    for name, value in asdict(options).items():
        if value is not None and name not in (*family.options, "entry"):
            raise UserError(f"{where} is a {family.name}: leave out `{name}`, which it does not have")
    return family.recognise(StateDict(contents, family.name, where, arguments or {}), options)


def official_state(net: nn.Module, state: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Return the official state_dict of a network of this project with the weights `state` of the file `where`."""
    family = _find_family(net, where)
    listed = not isinstance(net.config["schedule"], str)
    extras = {  # what no official layout has
        "schedule": listed or not net.shortcuts.fixed or net.shortcuts.recorded != ("alphas",),
        "skip_scale": net.long_skips is not None,
        "output_skip": net.output_skip is not None,
        "qk_norm": net.config["qk_norm"],
        "norm_type": net.config["norm_type"] != "layer",
        "mlp": net.config["mlp"] != "gelu",
    }
    for name, is_there in extras.items():
        if is_there:
            has = f"{where} has {name} {net.config[name]!r}"
            raise UserError(f"{has}, which no official layout has: export .safetensors")
    weights = {name: value.contiguous() for name, value in state.items() if name != "alphas"}
    return StateDict(weights, family.name, where).weights_for(net)


def _find_family(net: nn.Module, where: Path) -> Family:
    """Return the family of a network; raise a UserError if its class has no official layout."""
    for family in FAMILIES.values():
        if type(net) is family.net:
            return family
    raise UserError(f"{where} holds a {type(net).__name__}, which has no official layout: export .safetensors")
