"""Safetensors files with checksums, by which damage is detected when they are read.

The metadata hold a CRC-32 of each tensor's bytes, and one of the rest (names, dtypes, shapes, metadata and the tensors'
CRCs). Files without them, from earlier versions or other programs, are read without verification.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from uvit_decay.files.validation import as_type
from uvit_decay.files.wrapped_names import strip_wrappers
from uvit_decay.files.writing import check_file, replacing
from uvit_decay.terminal.errors import UserError, explain, one_line

TENSORS, HEADER = "crc32", "header_crc32"  # a file with only one of the two is damaged


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors and metadata with their checksums; the file replaces `path` when it is complete."""
    # Copies: safetensors refuses tensors that share memory, as tied ones and views do.
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    metadata = {**(metadata or {}), TENSORS: _crc32(tensors)}
    content = save(tensors, metadata | {HEADER: _header_crc32(metadata, tensors)})
    end = 8 + int.from_bytes(content[:8], "little")
    with replacing(path) as file:
        file.write(_in_order(content[8:end]))
        file.write(memoryview(content)[end:])


def _in_order(header: bytes) -> bytes:
    """Return length and text of a header with sorted metadata: safetensors orders them differently in each process."""
    entries = json.loads(header)
    entries["__metadata__"] = dict(sorted(entries["__metadata__"].items()))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors must begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def load_tensors(path: Path, verify: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and memory-mapped tensors of a safetensors file.

    Verification reads the whole file, at 1.8 GB/s from a warm cache; without it only tensors that are used are read.

    Args:
        path: the file.
        verify: compare the tensors with their checksums; names, shapes and metadata are always compared.
    """
    with explain(f"cannot read {path}", OSError):
        check_file(path)
    refusal = explain(f"{path} is truncated or not a safetensors file", SafetensorError, OSError, MemoryError)
    with refusal, safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not {TENSORS, HEADER} & metadata.keys():
        return metadata, tensors
    is_intact = metadata.pop(HEADER, None) == _header_crc32(metadata, tensors)
    checksums = metadata.pop(TENSORS, None)
    if is_intact and verify:
        is_intact = checksums == _crc32(tensors)
    if not is_intact:
        raise UserError(f"{path} is damaged: it is not what was written (CRC-32); make or fetch the file again")
    return metadata, tensors


def _crc32(tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of each tensor by name, as JSON."""
    checksums = {name: zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items()}
    return json.dumps(checksums, sort_keys=True)


def _header_crc32(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    entries = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    return str(zlib.crc32(json.dumps([metadata, entries], sort_keys=True).encode()))


def load_pickle(path: Path, whole: bool = True) -> Any:
    """Return the contents of a file of torch.save: tensors, plain values, argparse Namespaces; code is refused.

    The tensors of a zip are memory-mapped. The contents are compared with the checksums of the zip at 2.6 GB/s, the
    data of tensors only if `whole`.
    """
    with explain(f"cannot read {path}", OSError):
        check_file(path)
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
    try:
        if zipped:
            check_records(path, whole)
        # torch warns about other kinds of pickle, which are refused.
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals([Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        kind = "holds more than tensors and plain values and" if zipped else "is not a checkpoint, and such a file"
        raise UserError(f"{path} {kind} could run code: refused") from error
    except Exception as error:  # any type: arbitrary bytes can make an unpickler raise anything
        cause = one_line(error)
        raise UserError(f"{path} cannot be read, it is truncated or not a checkpoint ({cause})") from error


def load_any(path: Path) -> tuple[dict[str, str], Any]:
    """Return metadata and contents of a .safetensors or a file of torch.save, which has no metadata."""
    if path.suffix.lower() == ".safetensors":
        return load_tensors(path)
    return {}, load_pickle(path)


def check_records(path: Path, whole: bool) -> None:
    """Compare the records of a file of torch.save with their CRC-32s at 2.6 GB/s; tensors only if `whole`.

    Both names of a record are compared, too: torch reads by the offsets in the central directory alone, and would take
    one tensor for another of the same size.

    Raises:
        Exception: any exception that zipfile raises on damage.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if not any(record.CRC for record in records):  # torch has an option to write zeros instead
            return
        for record in records:
            if whole or "/data/" not in record.filename:
                with archive.open(record) as content:
                    while content.read(2**20):
                        pass


def load_weights(path: Path, whose: str) -> dict[str, Tensor]:
    """Return the weights in a file of another program, floating-point ones as float32; they may be memory-mapped.

    Parts that wrappers put before all names, such as `module.`, are removed, which a line on stderr says.

    Args:
        path: the file.
        whose: name of the weights in errors, such as "timm's ViT weights".
    """
    _, contents = load_any(path)
    state = as_type(dict[str, Tensor], contents, f"{whose} in {path}")
    check_weights(path, state)
    state, note = strip_wrappers(state, path)
    if note:
        print(f"{path}: {note}", file=sys.stderr)
    weights = {}
    for name, value in state.items():
        weights[name] = value.float() if value.is_floating_point() else value
    return weights


def check_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Raise a UserError if weights of the file `path` are not finite."""
    for name, value in state.items():
        if value.is_floating_point() and not value.float().isfinite().all():
            raise UserError(f"{path}: its {name} holds NaN or infinite values, no network works with it")


def mismatch(net: nn.Module, state: Mapping[str, Tensor], kind: str = "network that it describes") -> str | None:
    """Describe the first difference between `state` and the weights of `net`, called a `kind`; return None if they fit.

    Names, shapes and kinds of dtype (floating point or not) are compared; `alphas` and `betas` may be missing.
    """
    expected = net.state_dict()
    for name in expected | state:
        if name not in expected:
            return f"it has {name}, which no {kind} has"
        if name not in state:
            if name in ("alphas", "betas"):
                continue
            return f"it lacks {name}"
        actual, ours = state[name], expected[name]
        if actual.shape != ours.shape:
            return f"its {name} has the shape {tuple(actual.shape)}, not {tuple(ours.shape)}"
        if actual.is_floating_point() != ours.is_floating_point():
            return f"its {name} is of {actual.dtype}, not of {ours.dtype}"
    return None


def digest(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 of tensors, sorted by name, as float32; it does not depend on the file format."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(name.encode())
        found.update(value.float().contiguous().numpy())
    return found.hexdigest()
