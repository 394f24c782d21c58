"""Read checkpoint files, of this project and of third parties, without executing code that they contain."""

from __future__ import annotations

import pickle
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.checkpoint.detect import looks_like
from uvit_decay.diffusion.prediction import Prediction
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.runtime.errors import UserError, one_line
from uvit_decay.runtime.instantiate import Spec
from uvit_decay.runtime.plain import is_plain, parse, typed
from uvit_decay.runtime.tensor_files import damaged, load_tensors
from uvit_decay.runtime.zips import check_records, has_crcs

Weights = Literal["ema", "raw"]
KEY = "uvit_decay"  # key of the description in both formats


@dataclass(frozen=True)
class Description:
    """The description that a checkpoint stores: everything besides the weights that sampling needs."""

    net: Spec
    path: Spec
    prediction: Prediction
    sampling: Sampling
    class_names: tuple[str, ...]
    data: str
    step: int
    latents: LatentSpace | None = None

    @classmethod
    def of(cls, values: Any, path: Path) -> Description:
        """Build a description from plain values; entries that are no fields are ignored.

        Raises:
            UserError: invalid values; the message names the file `path`.
        """
        where = f"the description in {path}"
        known = {field.name for field in fields(cls)}
        values = typed(dict[str, object], values, where)
        if not is_plain(values):
            raise UserError(f"{where} holds more than plain values, or has no end")
        return typed(cls, {name: value for name, value in values.items() if name in known}, where)


@dataclass(frozen=True)
class Stored:
    """One set of weights of a checkpoint.

    `plain` holds the description's values as the file stores them; `not_averaged` are the names for which there is no
    EMA weight, so that `state` has the raw value.
    """

    description: Description
    plain: dict[str, Any]
    state: dict[str, Tensor]
    weights: Weights
    not_averaged: frozenset[str] = frozenset()


def read(path: Path, weights: Weights | None) -> Stored:
    """Read a checkpoint of either format; check types, checksums and finiteness, but not the fit to the network.

    Raises:
        UserError: missing, damaged or third-party file, one that contains code, weights that it lacks or that are not
            finite, or a description with values of wrong types.
    """
    stored = _read_exported(path) if path.suffix == ".safetensors" else _read_training(path, weights)
    if weights not in (None, stored.weights):
        raise UserError(f"{path} holds {stored.weights} weights, not {weights}")
    check_weights(path, stored.state)
    return stored


def read_training_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a .ckpt of this project, all compared with the checksums of its zip (at 2.6 GB/s).

    Raises:
        UserError: missing, damaged, exported or third-party file, or one that contains code.
    """
    if path.suffix == ".safetensors":
        raise UserError(f"{path} has weights but no optimizer: name a .ckpt of a run, such as checkpoints/last.ckpt")
    return _unpickle_ours(path, whole=True)


def _unpickle_ours(path: Path, whole: bool = False) -> dict[str, Any]:
    contents = unpickle(path, whole)
    if not isinstance(contents, dict) or KEY not in contents:
        raise UserError(f"{path} was not written by this project, it looks like {looks_like(contents)}")
    return contents


def _read_training(path: Path, weights: Weights | None) -> Stored:
    contents = _unpickle_ours(path)
    description = Description.of(contents[KEY], path)
    state = typed(dict[str, Tensor], contents.get("state_dict"), f"state_dict of {path}")
    state = {name.removeprefix("net."): value for name, value in state.items()}
    callbacks = typed(dict[str, object], contents.get("callbacks"), f"callbacks of {path}")
    averages = typed(dict[str, object], callbacks.get("EMA", {}), f"EMA of {path}")
    shadow = typed(dict[str, Tensor], averages.get("shadow", {}), f"EMA weights of {path}")
    if weights == "ema" and not shadow:
        raise UserError(f"{path} holds no EMA weights: its run had no EMA callback")
    if weights == "raw" or not shadow:
        return Stored(description, contents[KEY], state, "raw")
    not_averaged = frozenset(state.keys() - shadow.keys())
    return Stored(description, contents[KEY], state | shadow, "ema", not_averaged)


def _read_exported(path: Path) -> Stored:
    metadata, state = read_safetensors(path)
    if KEY not in metadata:
        raise UserError(f"{path} was not exported by this project, it looks like {looks_like(state)}")
    plain = parse(metadata[KEY], path)
    description = Description.of(plain, path)
    return Stored(
        description, plain, state, typed(Weights, plain.get("weights"), f"the description in {path}: weights")
    )


def unpickle(path: Path, whole: bool = False) -> Any:
    """Load a file of torch.save: tensors, plain values, argparse Namespaces; anything that could run code is refused.

    Everything except tensor data is compared with the checksums of the zip. `whole` includes the tensor data; otherwise
    `check_weights` verifies the tensors that are used.

    Raises:
        UserError: missing or damaged file, or one that is no checkpoint or could run code.
    """
    _check_readable(path)
    mapped = zipfile.is_zipfile(path)  # unused data, such as the optimizer state, is never read
    try:
        if mapped:
            check_records(path, whole)
        # torch warns about other kinds of pickle, which are refused below.
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals([Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        if mapped:
            raise UserError(f"{path} holds more than tensors and plain values and could run code: refused") from error
        raise UserError(f"{path} is not a checkpoint, and such a file could run code: refused") from error
    except Exception as error:  # any type: arbitrary bytes can make an unpickler raise anything
        raise UserError(f"{path} cannot be read, it is truncated or not a checkpoint ({one_line(error)})") from error


def check_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Raise a UserError for weights of the file `path` that are damaged, not finite, or larger than the file.

    In a file of torch.save, the storage of each weight must equal a record in size and CRC-32. Only these storages are
    read, not unused data such as the optimizer state.
    """
    plain = all(value.layout == torch.strided and not value.is_meta and not value.is_nested for value in state.values())
    if not plain or sum(value.nbytes for value in state.values()) > path.stat().st_size:
        raise UserError(f"{path} is damaged: its weights are not plain tensors, or larger than the file")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if has_crcs(archive):
                _check_storages(path, state, {(record.file_size, record.CRC) for record in archive.infolist()})
    for name, value in state.items():
        if value.is_floating_point() and not value.float().isfinite().all():
            raise UserError(f"{path}: its {name} holds NaN or infinite values, no network works with it")


def _check_storages(path: Path, state: Mapping[str, Tensor], records: Container[tuple[int, int]]) -> None:
    """Raise a UserError unless the storage of every weight has the size and the CRC-32 of a record."""
    storages = {value.untyped_storage().data_ptr(): name for name, value in state.items() if value.numel()}
    for name in storages.values():
        content = torch.empty(0, dtype=torch.uint8).set_(state[name].untyped_storage()).numpy()
        if (len(content), zlib.crc32(content)) not in records:
            raise damaged(path, f"{name} is")


def misfit(net: nn.Module, state: Mapping[str, Tensor], kind: str = "network that it describes") -> str | None:
    """Describe the first difference between weights and those of `net`; return None if they fit.

    Names, shapes and kinds of dtype (floating point or not) are compared; `alphas` and `betas` may be missing. The text
    calls the network `kind`.
    """
    wanted = net.state_dict()
    for name in wanted | state:
        if name not in wanted:
            return f"has {name}, which no {kind} has"
        if name not in state:
            if name in ("alphas", "betas"):
                continue
            return f"lacks {name}"
        found, own = state[name], wanted[name]
        if found.shape != own.shape:
            return f"its {name} has the shape {tuple(found.shape)}, not {tuple(own.shape)}"
        if found.is_floating_point() != own.is_floating_point():
            return f"its {name} is of {found.dtype}, not of {own.dtype}"
    return None


def _check_readable(path: Path) -> None:
    """Raise a UserError for a missing file, a web page or a text file, judged by the first bytes."""
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
    """Return metadata and tensors of a .safetensors file, compared with its checksums if it has any.

    Raises:
        UserError: missing or damaged file.
    """
    _check_readable(path)
    return load_tensors(path)


def read_foreign(path: Path) -> Any:
    """Load a third-party checkpoint; raise a UserError for a checkpoint of this project."""
    metadata, contents = read_safetensors(path) if path.suffix == ".safetensors" else ({}, unpickle(path))
    if KEY in metadata or (isinstance(contents, dict) and KEY in contents):
        raise UserError(f"{path} is a checkpoint of this project: use it as it is, or export it")
    return contents
