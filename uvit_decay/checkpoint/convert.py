"""Export of this project's checkpoints and import of official ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.checkpoint.detect import looks_like
from uvit_decay.checkpoint.io import KEY, Weights, check_weights, read, read_foreign, unpickle
from uvit_decay.checkpoint.loading import HOME, described
from uvit_decay.checkpoint.official import common as official
from uvit_decay.checkpoint.official import sit
from uvit_decay.checkpoint.official.recognized import ImportOptions
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, replacing
from uvit_decay.runtime.tensor_files import save_tensors

OFFICIAL_FILES: dict[Weights, str] = {"ema": "nnet_ema.pth", "raw": "nnet.pth"}


def export(source: Path, target: Path, weights: Weights | None = None) -> str:
    """Write one set of weights of a checkpoint: .safetensors with its description, .pth or .pt in the official layout.

    Return a note that lists what the written file does not record and an importer has to be given; empty if complete.

    Raises:
        UserError: as `load`, a target that cannot be written, or a network that the official layout cannot express.
    """
    _check_target(source, target, (".safetensors", ".pth", ".pt"))
    stored = read(source, weights)
    exported = target.suffix == ".safetensors"
    net = None if exported and not stored.description.net.is_from(HOME) else described(source, stored)
    if exported:
        _write(target, {**stored.plain, "weights": stored.weights}, stored.state)
        return ""
    bare = official.bare_state(net, stored.state, source)
    missing_metadata = official.missing_metadata(net, stored.plain, bare, source)
    with replacing(target) as file:
        torch.save(bare, file)
    return (
        f"an official file does not say {', '.join(missing_metadata)}: its reader must be told"
        if missing_metadata
        else ""
    )


def import_official(source: Path, target: Path, weights: Weights | None, hints: ImportOptions) -> str:
    """Convert an official file, or one of an official folder <step>.ckpt, to .safetensors; return a summary of it.

    Args:
        source: a bare state_dict as .pth or .safetensors, a training file of SiT, or a U-ViT folder with step.pth,
            nnet.pth and nnet_ema.pth.
        target: the .safetensors file to write.
        weights: the set to import, or the set that a bare file holds. None means `ema`, and `raw` for a file named
            nnet.pth.
        hints: settings that the file does not determine.

    Raises:
        UserError: another kind of file, or hints that do not fit it.
    """
    _check_target(source, target, (".safetensors",))
    if weights is None:
        weights = "raw" if source.name == OFFICIAL_FILES["raw"] else "ema"
    file = source / OFFICIAL_FILES[weights] if source.is_dir() else source
    if source.is_dir() and not file.is_file():
        raise UserError(f"{source} holds no {file.name}: give a folder <step>.ckpt of the official code, or a file")
    contents, hints, step = sit.opened(read_foreign(file), weights, hints, file)
    if isinstance(contents, Mapping):
        check_weights(file, {name: value for name, value in contents.items() if isinstance(value, Tensor)})
    found = official.recognise(contents, hints, file)
    if (source / "step.pth").is_file():
        step = unpickle(source / "step.pth")
    if type(step) is not int or not 0 <= step < 2**63:
        raise UserError(f"step.pth in {source} should hold a number, it looks like {looks_like(step)}")
    description = {**found.description(source.name), "step": step, "weights": weights}
    _write(target, description, found.complete_state())
    return f"recognised {found.summary()}, {weights} weights of step {step}"


def _check_target(source: Path, target: Path, suffixes: tuple[str, ...]) -> None:
    if target.suffix not in suffixes:
        raise UserError(f"the file to write must end in {' or '.join(suffixes)}, got {target}")
    if source.resolve() == target.resolve():
        raise UserError(f"{target} would replace the file that is read: write to another one")
    check_writable(target)


def _write(target: Path, description: dict[str, Any], state: dict[str, Tensor]) -> None:
    save_tensors(target, state, {KEY: json.dumps(description)})
