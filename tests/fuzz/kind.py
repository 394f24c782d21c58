"""The kinds of files for the fuzz suite, and the comparison of two values that were read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bytewise import Mutation
from torch import Tensor, nn


class Sources(NamedTuple):
    """Files that the makers start from: a training checkpoint, a folder of latents."""

    trained: Path
    encoded: Path


Reader = Callable[[Path, Path], Any]  # the folder of a case, and the file in it that was changed


def nothing_else(before: Any, after: Any, file: Path) -> bool:
    """Allow no value but the one that was written: the kind has checksums of all that it means."""
    return False


def anything_valid(before: Any, after: Any, file: Path) -> bool:
    """Allow every value that the reader takes: the kind has no checksums, an edited file is another file."""
    return True


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        make: write small valid files into a folder.
        read: read them by the public entry that commands use; raise a UserError for what is refused.
        files: glob of the files to change.
        mutations: those that know the format; may be empty.
        allowed: whether another value than the original's may be read.
    """

    make: Callable[[Path, Sources], None]
    read: Reader
    files: str
    mutations: tuple[Mutation, ...]
    allowed: Callable[[Any, Any, Path], bool] = nothing_else


def digest(value: Any) -> str:
    """Return a fingerprint of tensors, arrays, dataclasses and plain values inside one another."""
    total = hashlib.sha256()
    _feed(total.update, value)
    return total.hexdigest()


def _feed(update: Callable[[bytes], Any], value: Any) -> None:
    if isinstance(value, nn.Module):
        value = dict(value.state_dict())
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Tensor):
        value = value.detach().float().numpy() if value.is_floating_point() else value.numpy()
    if isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        update(f"dict of {len(value)}".encode())
        for key in sorted(value, key=repr):
            update(repr(key).encode())
            _feed(update, value[key])
    elif isinstance(value, list | tuple):
        update(f"list of {len(value)}".encode())
        for item in value:
            _feed(update, item)
    else:
        update(repr(value).encode(errors="surrogatepass"))
