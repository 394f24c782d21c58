"""Reading checkpoint files, ours and others', without running anything that is in them."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from uvit_decay.checkpoint.kinds import looks_like
from uvit_decay.errors import UserError, one_line

Weights = Literal["ema", "raw"]
KEY = "uvit_decay"  # of the description, in both forms


def read(path: Path, weights: Weights | None) -> tuple[dict[str, Any], dict[str, Tensor], Weights]:
    """Description, state_dict and kind of weights, of either form."""
    description, state, kind = _read_exported(path) if path.suffix == ".safetensors" else _read_training(path, weights)
    if weights not in (None, kind):
        raise UserError(f"{path} holds {kind} weights, not {weights}")
    return description, state, kind


def read_training_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a .ckpt of this project.

    Raises:
        UserError: missing, truncated or foreign file, or one that carries code.
    """
    contents = unpickle(path)
    if not isinstance(contents, dict) or KEY not in contents:
        raise UserError(f"{path} was not written by this project, it looks like {looks_like(contents)}")
    return contents


def _read_training(path: Path, weights: Weights | None) -> tuple[dict[str, Any], dict[str, Tensor], Weights]:
    contents = read_training_checkpoint(path)
    state = {name.removeprefix("net."): value for name, value in contents["state_dict"].items()}
    shadow = contents["callbacks"].get("EMA", {}).get("shadow", {})
    if weights == "ema" and not shadow:
        raise UserError(f"{path} holds no EMA weights: its run had no EMA callback")
    if weights == "raw" or not shadow:
        return contents[KEY], state, "raw"
    return contents[KEY], state | shadow, "ema"


def _read_exported(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], Weights]:
    metadata, state = read_safetensors(path)
    if KEY not in metadata:
        raise UserError(f"{path} was not exported by this project, it looks like {looks_like(state)}")
    description = json.loads(metadata[KEY])
    return description, state, description["weights"]


def unpickle(path: Path) -> Any:
    """What torch.save wrote: tensors, plain values and argparse's bags of them, nothing that could run code."""
    _check_readable(path)
    mapped = zipfile.is_zipfile(path)  # what is not needed, such as an optimizer's state, is not even read
    try:
        # Warnings are about other pickles, which are refused.
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals([Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        if zipfile.is_zipfile(path):
            raise UserError(f"{path} holds more than tensors and plain values and could run code: refused") from error
        raise UserError(f"{path} is not a checkpoint, and such a file could run code: refused") from error
    except Exception as error:  # any: bytes that are no pickle can lead an unpickler anywhere
        raise UserError(f"{path} cannot be read, it is truncated or not a checkpoint ({one_line(error)})") from error


def _check_readable(path: Path) -> None:
    """Raise a UserError where the first bytes show that this is no checkpoint at all."""
    if not path.is_file():
        raise UserError(f"the checkpoint {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if head.lstrip().startswith(b"<"):
        raise UserError(f"{path} is not a checkpoint but a web page: the download failed, fetch it again")
    if head and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        raise UserError(f"{path} is not a checkpoint but a text file")


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    _check_readable(path)
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({one_line(error)})") from error


def read_foreign(path: Path) -> Any:
    """What a file holds that should not be ours."""
    metadata, contents = read_safetensors(path) if path.suffix == ".safetensors" else ({}, unpickle(path))
    if KEY in metadata or (isinstance(contents, dict) and KEY in contents):
        raise UserError(f"{path} is a checkpoint of this project: use it as it is, or export it")
    return contents
