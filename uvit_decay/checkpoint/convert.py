"""Export of this project's checkpoints, and import of official files of U-ViT, SiT, DiT and MAE.

An official file is a state_dict without a model card. Names and shapes determine the sizes; the published
configurations supply the rest (heads, null label, path, sampling) unless the caller's `ImportOptions` do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from uvit_decay.checkpoint.detect import DIFFUSERS_DIT, MAE_FILE, SIT, UVIT, VIT_FILE, looks_like
from uvit_decay.checkpoint.io import HOME, KEY, ModelCard, StoredModel, read, read_third_party
from uvit_decay.checkpoint.official import diffusers_dit, mae, sit, uvit
from uvit_decay.checkpoint.official.common import IMPORTED, ImportOptions, Network, RecognisedModel, StateDict
from uvit_decay.checkpoint.official.timm import python_lines, timm_state
from uvit_decay.class_names import class_hash, class_list
from uvit_decay.nn.mae import MAE
from uvit_decay.nn.sit import SiT
from uvit_decay.nn.uvit import UViT
from uvit_decay.nn.vit import DECAY, ViT
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, claimed, replacing
from uvit_decay.runtime.tensor_files import check_weights, load_pickle, save_tensors
from uvit_decay.sampling_options import Weights


class Family(NamedTuple):
    """A family of official files: name in messages, class, the function that recognises its files, options, entry.

    `options` are those of the `ImportOptions` that apply to it; `entry` is that of a dict around the state_dict.
    """

    name: str
    net: type[nn.Module]
    recognise: Callable[[StateDict, ImportOptions], RecognisedModel]
    options: tuple[str, ...]
    entry: str | None = None


ENCODER = ("heads", "alpha_min", "pixels")
DENOISER = ("heads", "num_classes", "path", "prediction", "alpha_min", "vae", "classes")
FAMILIES = {  # by `looks_like`
    UVIT: Family("U-ViT", UViT, uvit.recognise, DENOISER),
    SIT: Family("SiT", SiT, sit.recognise, DENOISER),
    DIFFUSERS_DIT: Family("DiT of diffusers", SiT, diffusers_dit.recognise, DENOISER),
    MAE_FILE: Family("masked autoencoder", MAE, mae.recognise, (*ENCODER, "decoder_heads", "norm_pix"), mae.ENTRY),
    VIT_FILE: Family("vision transformer", ViT, mae.recognise_encoder, (*ENCODER, "num_classes", "classes"), mae.ENTRY),
}
OFFICIAL_FILES: dict[Weights, str] = {"ema": "nnet_ema.pth", "raw": "nnet.pth"}
# Arguments of networks that their weights may not determine.
StoredType = Literal["float32", "bfloat16"]
ARGUMENTS = ("num_classes", "null_label", "time_scale", "time", "learned_variance", "norm_pix", "pixels", "pool")


def export_file(
    source: Path,
    target: Path,
    weights: Weights | None = None,
    *,
    to: Literal["timm"] | None = None,
    dtype: StoredType = "float32",
) -> str:
    """Write one set of weights of a checkpoint into a file; the options are those of `uvit-decay export`.

    The notes that are returned say what an importer of the file has to be given, or how timm reads it.
    """
    with _target(source, target, (".safetensors", ".pth", ".pt")):
        stored = read(source, weights)
        if target.suffix == ".safetensors" and not to:
            state = stored.state
            if stored.card.net.is_from(HOME):  # a class from elsewhere is not built
                net = stored.network()
                if dtype == "bfloat16":
                    state = _round_parameters(state, net)
            elif dtype == "bfloat16":
                raise UserError(f"--dtype bfloat16: {source} has a network that is not part of uvit_decay")
            _write(target, stored.card, state)
            return _note_on_autoencoder(stored.card)
        if dtype == "bfloat16":
            raise UserError(f"--dtype bfloat16 is for .safetensors files of this project, got {target}")
        net = stored.network()
        if to:
            state = timm_state(net, stored.state, stored.where)
            save_tensors(target, state) if target.suffix == ".safetensors" else _save(target, state)
            notes = [python_lines(net, state, target)]
        else:
            notes = _write_official(target, stored, net)
        if isinstance(net, MAE | ViT) and stored.card.data.startswith(IMPORTED):
            notes.append(mae.LICENCE)
        return "\n".join(notes)


def _round_parameters(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Return the state with the network's parameters in bfloat16; buffers, such as recorded alphas, keep their type."""
    parameters = {name for name, _ in net.named_parameters()}
    rounded = {}
    for name, value in state.items():
        rounded[name] = value.to(torch.bfloat16) if name in parameters else value
    return rounded


def _note_on_autoencoder(card: ModelCard) -> str:
    """Return a note for a card whose autoencoder is a folder of this machine; it is empty for others."""
    if card.latents is None or not Path(card.latents.vae).is_absolute():
        return ""
    return f"its autoencoder is a folder of this machine, {card.latents.vae}: elsewhere name one with --vae"


def _write_official(target: Path, stored: StoredModel, net: nn.Module) -> list[str]:
    """Write the official layout and return a note on what it does not record."""
    state = official_state(net, stored.state, stored.where)
    missing = missing_metadata(net, stored.card, state, target)
    if isinstance(net, MAE):
        state |= mae.unread_skips(net, state)
    entry = _family(net, stored.where).entry
    _save(target, {entry: state} if entry else state)
    if not missing:
        return []
    unknown = [name for name in DECAY[1:] if f"{name} {net.config[name]}" in missing]
    more = f"; uvit-decay import takes no {' and no '.join(unknown)}, keep a .safetensors" if unknown else ""
    return [f"an official file does not record {', '.join(missing)}: pass them on with it{more}"]


def _save(target: Path, contents: Mapping[str, Any]) -> None:
    with replacing(target) as file:
        torch.save(contents, file)


def import_official(
    source: Path,
    target: Path,
    weights: Weights | None = None,
    options: ImportOptions = ImportOptions(),  # noqa: B008  frozen
) -> str:
    """Turn an official file into a checkpoint of this project and return notes, as `uvit-decay import` does."""
    with _target(source, target, (".safetensors",)):
        stored = read_official(source, weights, options)
        _write(target, stored.card, stored.state)
        return "\n".join(stored.notes)


def read_official(
    source: Path,
    weights: Weights | None = None,
    options: ImportOptions = ImportOptions(),  # noqa: B008  frozen
) -> StoredModel:
    """Read an official file as a checkpoint of this project; see `import_official`."""
    if weights is None and source.name == OFFICIAL_FILES["raw"]:
        weights = "raw"
    file = _weights_file(source, weights or "ema") if source.is_dir() else source
    contents, options, step = sit.opened(read_third_party(file), weights or "ema", options, file)
    contents, options = mae.opened(contents, options, file)
    if isinstance(contents, Mapping):
        check_weights(file, {name: value for name, value in contents.items() if isinstance(value, Tensor)})
    model = _named(recognise(contents, options, file), options, file)
    if (source / "step.pth").is_file():
        step = load_pickle(source / "step.pth")
    if type(step) is not int or not 0 <= step < 2**63:
        raise UserError(f"step.pth in {source} should hold a number, it looks like {looks_like(step)}")
    alphas = torch.tensor(model.net.shortcuts.alphas)  # which a loader compares
    named = None if model.class_names is None else class_hash(model.class_names)
    card = replace(model.card(source.name, step, weights), class_hash=named)
    summary = f"recognised {model.summary()}, {card.weights} weights of step {step}"
    return StoredModel(source, card, {**model.state, "alphas": alphas}, notes=(summary, *model.notes))


def _named(model: RecognisedModel, options: ImportOptions, where: Path) -> RecognisedModel:
    """Return the model with the names of its classes in the list of the options, if there is one."""
    if options.classes is None:
        return model
    names, count = class_list(options.classes), model.net.num_classes
    if len(names) != count:
        raise UserError(f"{where} has {count} classes, --classes {options.classes} names {len(names)}")
    return replace(model, class_names=names)


def _weights_file(folder: Path, weights: Weights) -> Path:
    """Return the file of the weights in the folder of a U-ViT or of a DiT of diffusers."""
    file = diffusers_dit.weights_file(folder) or folder / OFFICIAL_FILES[weights]
    if not file.is_file():
        raise UserError(
            f"{folder} holds no {file.name}: give a folder <step>.ckpt of U-ViT's code, a DiT of diffusers, or a file"
        )
    return file


@contextmanager
def _target(source: Path, target: Path, suffixes: tuple[str, ...]) -> Iterator[None]:
    """Check that `target` can be written, and keep other programs from it meanwhile."""
    if target.suffix not in suffixes:
        raise UserError(f"the file to write must end in {' or '.join(suffixes)}, got {target}")
    if os.path.realpath(source) == os.path.realpath(target):  # no error at a link to itself
        raise UserError(f"{target} would replace the file that is read: write to another one")
    check_writable(target)
    with claimed(target):
        yield


def _write(target: Path, card: ModelCard, state: Mapping[str, Tensor]) -> None:
    save_tensors(target, state, {KEY: json.dumps(card.to_dict())})


def recognise(contents: Any, options: ImportOptions, where: Path) -> RecognisedModel:
    """Return the network of an official file, given its `contents`; `where`, its path, is for error messages."""
    kind = looks_like(contents)
    if kind not in FAMILIES:
        raise UserError(f"{where} is no official U-ViT, SiT or MAE, it looks like {kind}")
    family = FAMILIES[kind]
    for name, value in asdict(options).items():
        if value is not None and name not in family.options:
            raise UserError(f"{where} is a {family.name}: leave out --{name.replace('_', '-')}, which it does not have")
    return family.recognise(StateDict.of(contents, family.name, where), options)


def official_state(net: nn.Module, state: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Return the official state_dict of `net`, a network of this project, with these weights of the file `where`."""
    family = _family(net, where)
    listed = not isinstance(net.config["schedule"], str)
    if listed or net.shortcuts.learned or net.shortcuts.recorded != ("alphas",):
        raise UserError(
            f"{where} has the schedule {net.config['schedule']!r}, whose weights the official layout has no place for: "
            "export .safetensors"
        )
    if net.long_skips is not None:
        raise UserError(
            f"{where} has skip_scale {net.config['skip_scale']}, which no official layout has: export .safetensors"
        )
    if net.config["qk_norm"] or net.config["norm_type"] != "layer":
        raise UserError(
            f"{where} has qk_norm {net.config['qk_norm']} and norm_type {net.config['norm_type']!r}, which no official "
            "layout has: export .safetensors"
        )
    weights = {name: value.contiguous() for name, value in state.items() if name != "alphas"}
    return StateDict(weights, family.name, where).fitting(net)


def _family(net: nn.Module, where: Path) -> Family:
    for family in FAMILIES.values():
        if type(net) is family.net:
            return family
    known = ", ".join(dict.fromkeys(family.net.__name__ for family in FAMILIES.values()))
    raise UserError(f"{where} holds a {type(net).__name__}, official layouts are for {known}: export .safetensors")


def missing_metadata(net: Network, card: ModelCard, state: Mapping[str, Tensor], where: Path) -> list[str]:
    """List what an importer of the official state_dict of `net` would not find or guess, as strings "name value".

    The state_dict is recognised again, as an importer would, and the result is compared with `net` and `card`: every
    difference has to be passed on with the file.
    """
    # Heads and alpha_min are given because recognition can fail without them; both are listed below where needed.
    ours = net.config
    given = ImportOptions(heads=ours["heads"], alpha_min=1.0, decoder_heads=ours.get("decoder_heads"))
    guess = recognise(state, given, where)
    names = [] if guess.size else ["heads"]
    if ours.get("decoder_heads") != mae.DECODER_HEADS.get(ours.get("decoder_dim")):
        names.append("decoder_heads")
    names += [name for name in ARGUMENTS if ours.get(name) != guess.net.config.get(name)]
    if ours["alpha_min"] != 1.0:
        names += [name for name in DECAY if ours[name] != guess.net.config[name]]
    elif guess.decayed:
        names.append("alpha_min")  # the importer requires it
    if ours.get("learn_sigma") is False:  # which the authors' constructors have on by default
        names.append("learn_sigma")
    missing = [f"{name} {ours[name]}" for name in names]
    if card.prediction != guess.prediction:
        missing.append(f"prediction {card.prediction}")
    if card.path and card.path != guess.card("").path:
        missing.append(f"path {card.path.class_path.rpartition('.')[2]} {card.path.init_args}")
    for name in ("vae", "scale", "shift"):
        value = getattr(card.latents, name, None)  # None for pixels
        if value != getattr(guess.latents, name, None):
            missing.append(f"{name} {value}")
    return missing
