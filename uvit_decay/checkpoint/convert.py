"""Export of this project's checkpoints, and import of official files of U-ViT and SiT.

An official file is a bare state_dict without a model card. Names and shapes determine the sizes; the published
configurations supply the rest (heads, null label, path, sampling) unless the caller's `ImportOptions` do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.card import KEY, ModelCard, Weights
from uvit_decay.checkpoint.detect import SIT, UVIT, looks_like
from uvit_decay.checkpoint.io import HOME, check_weights, read, read_third_party, unpickle
from uvit_decay.checkpoint.official import sit, uvit
from uvit_decay.checkpoint.official.common import PATHS, ImportOptions, RecognisedModel, StateDict
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, replacing
from uvit_decay.runtime.tensor_files import save_tensors


class Family(NamedTuple):
    """A family of official files: name in messages, class, and the function that recognises its files."""

    name: str
    net: type[nn.Module]
    recognise: Callable[[StateDict, ImportOptions], RecognisedModel]


FAMILIES = {UVIT: Family("U-ViT", UViT, uvit.recognise), SIT: Family("SiT", SiT, sit.recognise)}  # by `looks_like`
OFFICIAL_FILES: dict[Weights, str] = {"ema": "nnet_ema.pth", "raw": "nnet.pth"}
ARGUMENTS = ("num_classes", "null_label", "time_scale")  # of networks, which their weights may not determine
DECAY = ("alpha_min", "schedule", "granularity", "index", "branches")


def export(source: Path, target: Path, weights: Weights | None = None) -> str:
    """Write one set of weights of a checkpoint of this project.

    Args:
        source: a .ckpt from training, or a .safetensors.
        target: a .safetensors, with the model card; or a .pth or .pt in the official layout.
        weights: set to write; default: EMA if the run kept them.

    Returns:
        A note that lists what the written file does not record and its importer has to be given; empty if complete.
    """
    _check_target(source, target, (".safetensors", ".pth", ".pt"))
    stored = read(source, weights)
    if target.suffix == ".safetensors":
        if stored.card.net.is_from(HOME):  # a class from elsewhere is not built
            stored.network()
        _write(target, stored.card, stored.state)
        return ""
    net = stored.network()
    state = official_state(net, stored.state, source)
    missing = missing_metadata(net, stored.card, state, source)
    with replacing(target) as file:
        torch.save(state, file)
    return f"an official file does not record {', '.join(missing)}: pass them on with it" if missing else ""


def import_official(
    source: Path,
    target: Path,
    weights: Weights | None = None,
    options: ImportOptions = ImportOptions(),  # noqa: B008  frozen
) -> str:
    """Turn an official U-ViT or SiT file into a checkpoint of this project.

    Args:
        source: a bare state_dict as .pth or .safetensors, a training file of SiT, or a U-ViT's folder <step>.ckpt with
            step.pth, nnet.pth and nnet_ema.pth.
        target: the .safetensors file to write.
        weights: set to import, or the set that a bare file holds; default: ema, and raw for a file named nnet.pth.
        options: settings that the file does not determine.

    Returns:
        A summary of the file for the user to verify.
    """
    _check_target(source, target, (".safetensors",))
    if weights is None:
        weights = "raw" if source.name == OFFICIAL_FILES["raw"] else "ema"
    file = source / OFFICIAL_FILES[weights] if source.is_dir() else source
    if source.is_dir() and not file.is_file():
        raise UserError(f"{source} holds no {file.name}: give a folder <step>.ckpt of the official code, or a file")
    contents, options, step = sit.opened(read_third_party(file), weights, options, file)
    if isinstance(contents, Mapping):
        check_weights(file, {name: value for name, value in contents.items() if isinstance(value, Tensor)})
    model = recognise(contents, options, file)
    if (source / "step.pth").is_file():
        step = unpickle(source / "step.pth")
    if type(step) is not int or not 0 <= step < 2**63:
        raise UserError(f"step.pth in {source} should hold a number, it looks like {looks_like(step)}")
    alphas = torch.tensor(model.net.shortcuts.alphas)  # which a loader compares
    _write(target, model.card(source.name, step, weights), {**model.state, "alphas": alphas})
    return f"recognised {model.summary()}, {weights} weights of step {step}"


def _check_target(source: Path, target: Path, suffixes: tuple[str, ...]) -> None:
    if target.suffix not in suffixes:
        raise UserError(f"the file to write must end in {' or '.join(suffixes)}, got {target}")
    if source.resolve() == target.resolve():
        raise UserError(f"{target} would replace the file that is read: write to another one")
    check_writable(target)


def _write(target: Path, card: ModelCard, state: Mapping[str, Tensor]) -> None:
    save_tensors(target, state, {KEY: json.dumps(card.to_dict())})


def recognise(contents: Any, options: ImportOptions, where: Path) -> RecognisedModel:
    """Return the network of an official file, given its `contents`; `where`, its path, is for error messages."""
    kind = looks_like(contents)
    if kind not in FAMILIES:
        raise UserError(f"{where} is no official U-ViT or SiT, it looks like {kind}")
    family = FAMILIES[kind]
    return family.recognise(StateDict.of(contents, family.name, where), options)


def official_state(net: nn.Module, state: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Return the official state_dict of `net`, a network of this project, with these weights of the file `where`."""
    family = next((family for family in FAMILIES.values() if type(net) is family.net), None)
    if family is None:
        kind = type(net).__name__
        raise UserError(f"{where} holds a {kind}, official layouts are for UViT and SiT: export .safetensors")
    if net.shortcuts.learnable or set(net.shortcuts.betas) != {1.0}:
        raise UserError(
            f"{where} has the schedule {net.config['schedule']!r}, whose weights the official layout has no place for: "
            "export .safetensors"
        )
    weights = {name: value.contiguous() for name, value in state.items() if name != "alphas"}
    return StateDict(weights, family.name, where).fitting(net)


def missing_metadata(net: UViT | SiT, card: ModelCard, state: Mapping[str, Tensor], where: Path) -> list[str]:
    """List what an importer of the official state_dict of `net` would not find or guess, as strings "name value".

    The state_dict is recognised again, as an importer would, and the result is compared with `net` and `card`: every
    difference has to be passed on with the file.
    """
    # Heads and alpha_min are given because recognition can fail without them; both are listed below where needed.
    ours = net.config
    guess = recognise(state, ImportOptions(heads=ours["heads"], alpha_min=1.0), where)
    names = [] if guess.size else ["heads"]
    names += [name for name in ARGUMENTS if ours.get(name) != guess.net.config.get(name)]
    if ours["alpha_min"] != 1.0:
        names += [name for name in DECAY if ours[name] != guess.net.config[name]]
    elif ours.get("wiring") == "decayed":
        names.append("alpha_min")  # the importer requires it for this wiring
    missing = [f"{name} {ours[name]}" for name in names]
    if card.prediction != guess.prediction:
        missing.append(f"prediction {card.prediction}")
    path = card.noise_path()
    if path != PATHS[guess.path]:
        missing.append(f"path {type(path).__name__} {asdict(path)}")
    for name in ("vae", "scale", "shift"):
        value = getattr(card.latents, name, None)  # None for pixels
        if value != getattr(guess.latents, name, None):
            missing.append(f"{name} {value}")
    return missing
