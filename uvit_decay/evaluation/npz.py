"""Arrays of .npz files, read by numpy without pickles and compared with their checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError

import numpy as np
import psutil

from uvit_decay.data.archives import DAMAGED, open_file
from uvit_decay.runtime.errors import UserError, explain


@contextmanager
def _open_arrays(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open a regular file; turn errors of zipfile and numpy on damaged files into a UserError."""
    damaged = explain(f"{path} cannot be read", *DAMAGED, MemoryError, TokenError)
    with damaged, open_file(path) as file:
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an .npz")
        with arrays:
            yield arrays


def names(path: Path) -> list[str]:
    """Return the names of the arrays in a file, after a check of its checksums at about 1 GB/s.

    Raises:
        UserError: the file is not an .npz, is damaged, or unpacks to more bytes than this machine has memory.
    """
    with _open_arrays(path) as arrays:
        size = sum(member.file_size for member in arrays.zip.infolist())  # zipfile unpacks no more than this
        memory = psutil.virtual_memory().total
        if size > memory:
            raise ValueError(f"{size:,} bytes when unpacked, more than the {memory:,} of this machine's memory")
        if damaged := arrays.zip.testzip():
            raise ValueError(f"{damaged} is damaged (CRC-32)")
        present = []
        for info in arrays.zip.infolist():
            if info.comment:  # numpy writes no comments; if the length of a comment is damaged, it hides further arrays
                raise ValueError("a comment in its directory")
            present.append(info.filename.removesuffix(".npy"))
        return present


def read(path: Path, name: str, expected: str, fits: Callable[[tuple[int, ...], np.dtype], bool]) -> np.ndarray:
    """Return an array of a file that `names` has checked.

    Args:
        path: the .npz file.
        name: name of the array.
        expected: required contents of the array, in words.
        fits: function (shape, dtype) -> whether they are as required.

    Raises:
        UserError: the array cannot be read, or its shape or dtype does not fit.
    """
    with _open_arrays(path) as arrays:
        array = arrays[name]
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name} is not an array")  # numpy returns the bytes of a member of another kind
    if not fits(array.shape, array.dtype):
        raise UserError(f"{path}: {name} must be {expected}, it is {array.dtype} {array.shape}")
    return array
