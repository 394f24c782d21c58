"""Arrays of .npz files, read by numpy without pickles and compared with their checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError

import numpy as np

from uvit_decay.data.archives import DAMAGED, open_file
from uvit_decay.files.writing import PAGE, check_content
from uvit_decay.terminal.errors import UserError, explain


@contextmanager
def _open_arrays(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open a regular file; turn errors of zipfile and numpy on damaged files into a UserError."""
    damaged = explain(f"{path} cannot be read", *DAMAGED, MemoryError, TokenError)
    with damaged, open_file(path) as file:
        check_content(path, file.read(PAGE))
        file.seek(0)
        arrays = np.load(file, allow_pickle=False)
        with arrays:
            yield arrays


def names(path: Path) -> list[str]:
    """Return the names of the arrays in a file, from its directory; no array is read."""
    with _open_arrays(path) as arrays:
        for member in arrays.zip.infolist():
            arrays.zip.open(member).close()  # raises if the member at its offset has another name
            if member.comment:  # numpy writes none; if the length of a comment is damaged, it hides further arrays
                raise ValueError("a comment in its directory")
        return list(arrays.files)


def read(path: Path, name: str, expected: str, fits: Callable[[tuple[int, ...], np.dtype], bool]) -> np.ndarray:
    """Return an array of a file, compared with its checksum.

    Args:
        path: the .npz file.
        name: name of the array.
        expected: required contents of the array, in words.
        fits: function (shape, dtype) -> whether they are as required.
    """
    with _open_arrays(path) as arrays, arrays.zip.open(f"{name}.npy") as content:
        array = np.lib.format.read_array(content, allow_pickle=False)
        if content.read(1):  # the end of the member, where zipfile compares the checksum
            raise ValueError(f"{name} is longer than its header says")
    if not fits(array.shape, array.dtype):
        raise UserError(f"{path}: {name} must be {expected}, it is {array.dtype} {array.shape}")
    return array
