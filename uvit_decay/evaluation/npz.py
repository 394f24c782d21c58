"""Arrays of .npz files, read by numpy without pickles and compared with their checksums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from zipfile import ZipExtFile

import numpy as np
import psutil

from uvit_decay.data.archives import DAMAGED, open_file
from uvit_decay.runtime.errors import UserError, explain
from uvit_decay.runtime.files import PAGE, check_content


@contextmanager
def _open_arrays(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open a regular file; turn errors of zipfile and numpy on damaged files into a UserError."""
    damaged = explain(f"{path} cannot be read", *DAMAGED, MemoryError, TokenError)
    with damaged, open_file(path) as file:
        check_content(path, file.read(PAGE))
        file.seek(0)
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an .npz")
        with arrays:
            yield arrays


def names(path: Path) -> list[str]:
    """Return the names of the arrays in a file, from its directory; no array is read.

    Raises:
        UserError: the file is not an .npz, is damaged, or unpacks to more bytes than this machine has memory.
    """
    with _open_arrays(path) as arrays:
        members = arrays.zip.infolist()
        size = sum(member.file_size for member in members)  # zipfile unpacks no more than this
        memory = psutil.virtual_memory().total
        if size > memory:
            raise ValueError(f"{size:,} bytes when unpacked, more than the {memory:,} of this machine's memory")
        present = []
        for member in members:
            arrays.zip.open(member).close()  # raises if the member at its offset has another name
            if member.comment:  # numpy writes none; if the length of a comment is damaged, it hides further arrays
                raise ValueError("a comment in its directory")
            present.append(member.filename.removesuffix(".npy"))
        return present


def read(path: Path, name: str, expected: str, fits: Callable[[tuple[int, ...], np.dtype], bool]) -> np.ndarray:
    """Return an array of a file, compared with its checksum; its header is checked before memory is taken.

    Args:
        path: the .npz file.
        name: name of the array.
        expected: required contents of the array, in words.
        fits: function (shape, dtype) -> whether they are as required.

    Raises:
        UserError: the array cannot be read, its shape or dtype does not fit, or it has another number of bytes.
    """
    with _open_arrays(path) as arrays:
        member = arrays.zip.getinfo(f"{name}.npy")
        with arrays.zip.open(member) as content:
            shape, dtype = _read_header(content)
            values_begin = content.tell()
        if not fits(shape, dtype):
            raise UserError(f"{path}: {name} must be {expected}, it is {dtype} {shape}")
        claimed = math.prod(shape) * dtype.itemsize
        stored = member.file_size - values_begin
        if claimed != stored or min(shape, default=0) < 0:
            raise ValueError(f"{name} is {dtype} {shape}, which are {claimed:,} bytes, and has {stored:,}")
        with arrays.zip.open(member) as content:
            array = np.lib.format.read_array(content, allow_pickle=False)
            content.read(1)  # the end of the member, where zipfile compares the checksum
    return array


def _read_header(content: ZipExtFile) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of the array in an open .npy file."""
    version = np.lib.format.read_magic(content)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(content)
    else:  # 3.0 is for structures with names outside Latin-1
        raise ValueError(f"an array of version {version}, known are 1.0 and 2.0")
    return shape, dtype
