"""Checkpoints that need nothing else: a network, its weights, and how to sample from it, in one file.

Two forms are read: Lightning's .ckpt from training (raw weights, EMA weights, optimizer) and the exported .safetensors
(one set of weights, the description as JSON in its header). No code from a file is ever run: tensors are unpickled with
weights_only, and the classes that a file names must be this package's, or be named by the caller.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from uvit_decay.diffusion.generate import Sampling, Source
from uvit_decay.diffusion.path import Path as NoisePath
from uvit_decay.errors import UserError, one_line, user_errors
from uvit_decay.image import check_writable

Weights = Literal["ema", "raw"]
KEY = "uvit_decay"  # of the description, in both forms


@dataclass(frozen=True)
class Checkpoint:
    """A trained network, in eval mode, and its description.

    `weights` says which weights it holds; `step` is the optimizer step that it was saved at.
    """

    net: nn.Module
    path: NoisePath
    prediction: Literal["eps", "x"]
    sampling: Sampling
    class_names: tuple[str, ...]
    data: str
    step: int
    weights: Weights

    def source(self, device: torch.device) -> Source:
        """The network on `device`, as samplers want it."""
        return Source.of(self.net.to(device), self.path, self.prediction, device)


def load(path: Path, weights: Weights | None = None, trusted: Sequence[str] = ()) -> Checkpoint:
    """Read a checkpoint of either form.

    Args:
        path: a .ckpt or a .safetensors file.
        weights: null takes EMA weights where the file has them, else raw ones.
        trusted: full names of classes outside uvit_decay that the file may name as its network.

    Raises:
        UserError: missing, truncated or foreign file, one that carries code, weights that it does not have.
    """
    if not path.is_file():
        raise UserError(f"the checkpoint {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    description, state, kind = _read_exported(path) if path.suffix == ".safetensors" else _read_training(path, weights)
    if weights not in (None, kind):
        raise UserError(f"{path} holds {kind} weights, not {weights}")
    net = _build(description["net"], nn.Module, "uvit_decay.nn", trusted)
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{path}: the weights do not fit the network that it describes: {one_line(error)}") from error
    return Checkpoint(
        net.eval(),
        _build(description["path"], NoisePath, "uvit_decay.diffusion.path", ()),
        description["prediction"],
        Sampling(**description["sampling"]),
        tuple(description["class_names"]),
        description["data"],
        description["step"],
        kind,
    )


def read_training_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a .ckpt of this project.

    Raises:
        UserError: missing, truncated or foreign file, or one that carries code.
    """
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"the checkpoint {path} does not exist") from error
    except pickle.UnpicklingError as error:
        if zipfile.is_zipfile(path):
            raise UserError(
                f"{path} holds more than tensors and plain values, which could run code: refused"
            ) from error
        raise UserError(f"{path} is not a checkpoint") from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read, it is truncated or not a checkpoint ({one_line(error)})") from error
    if not isinstance(contents, dict) or KEY not in contents:
        keys = ", ".join(map(str, list(contents)[:4])) if isinstance(contents, dict) else type(contents).__name__
        raise UserError(f"{path} was not written by this project (it holds {keys} ...)")
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
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read, it is truncated or not a safetensors file ({one_line(error)})"
        ) from error
    if KEY not in metadata:
        raise UserError(f"{path} was not exported by this project: its header has no {KEY!r}")
    description = json.loads(metadata[KEY])
    return description, state, description["weights"]


def _build(spec: dict[str, Any], base: type, home: str, trusted: Sequence[str]) -> Any:
    """The object that a checkpoint describes, if its class is at home in `home` or trusted."""
    name = spec["class_path"]
    if not name.startswith(f"{home}.") and name not in trusted:
        raise UserError(
            f"the checkpoint names the class {name}, which is not part of uvit_decay: --trust {name} allows it"
        )
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"the checkpoint names the class {name}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"the checkpoint names {name}, which is no {base.__name__}")
    try:
        return found(**spec["init_args"])
    except TypeError as error:
        raise UserError(f"the checkpoint describes {name} as another version knew it: {one_line(error)}") from error


def export(source: Path, target: Path, weights: Weights | None = None) -> None:
    """Write one set of weights of a .ckpt, with its description, as a .safetensors file.

    Raises:
        UserError: as `load`, or a target that cannot be written.
    """
    if target.suffix != ".safetensors":
        raise UserError(f"the exported file must end in .safetensors, got {target}")
    check_writable(target)
    description, state, kind = _read_training(source, weights)
    metadata = {KEY: json.dumps({**description, "weights": kind})}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, target, metadata)


def main(args: Sequence[str]) -> None:
    """python -m uvit_decay.checkpoint export runs/.../last.ckpt model.safetensors [--weights ema|raw]"""
    parser = argparse.ArgumentParser(prog="python -m uvit_decay.checkpoint", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="command")
    exporting = commands.add_parser("export", help="write one set of weights as .safetensors")
    exporting.add_argument("source", type=Path, help="a .ckpt from training")
    exporting.add_argument("target", type=Path, help="the .safetensors file to write")
    exporting.add_argument("--weights", choices=("ema", "raw"), help="default: EMA where the run kept them")
    options = parser.parse_args(args)
    export(options.source, options.target, options.weights)
    print(f"wrote {options.target} ({options.target.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
