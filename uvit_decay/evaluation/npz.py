"""Arrays of .npz files: sizes are checked before memory is allocated, and checksums are compared."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError

import numpy as np

from uvit_decay.data.archives import DAMAGED, open_file
from uvit_decay.runtime.errors import UserError, explained


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a regular file; turn what zipfile and numpy raise on damaged ones into a UserError."""
    damaged = explained(f"{path} cannot be read", *DAMAGED, MemoryError, TokenError)
    with damaged, open_file(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


def names(path: Path) -> list[str]:
    """Return the names of the arrays in a file; raise a UserError if it is no .npz."""
    with _opened(path) as archive:
        for info in archive.infolist():
            archive.open(info).close()  # compares both copies of the name: a damaged one is not missing
            if info.comment:  # numpy writes none: a damaged length of one hides further arrays
                raise ValueError("a comment in its directory")
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read(
    path: Path, name: str, expected: str, fits: Callable[[tuple[int, ...], np.dtype], bool], mapped: bool = False
) -> np.ndarray:
    """Return an array of a file, all of it compared with the zip's CRC-32, at about 1 GB/s.

    Args:
        path: the .npz file.
        name: name of the array.
        expected: what it must be, in words.
        fits: whether this shape and dtype are right; asked before memory is taken.
        mapped: map the array from the disk if it is not compressed.

    Raises:
        UserError: another array than expected, or with another number of bytes than it states.
    """
    with _opened(path) as archive, archive.open(f"{name}.npy") as member:
        info = archive.getinfo(f"{name}.npy")
        shape, fortran, dtype = _header(info, member)
        if not fits(shape, dtype):
            raise UserError(f"{path}: {name} must be {expected}, it is {dtype} {shape}")
        start = _start(archive, info) + member.tell()
        if not mapped or info.compress_type != zipfile.ZIP_STORED:
            with archive.open(info) as whole:
                return np.lib.format.read_array(whole, allow_pickle=False)
        while member.read(2**20):
            pass
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def _header(info: zipfile.ZipInfo, member: zipfile.ZipExtFile) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the entries of an array's header; raise a ValueError if the array has another size than it states."""
    first = np.lib.format.read_magic(member) == (1, 0)
    read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(member)
    size = info.file_size - member.tell()
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{info.filename} states {dtype} {shape} and has {size} bytes")
    return shape, fortran, dtype


def _start(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Return the place of the bytes of a member, after its own header, whose length the directory does not tell."""
    archive.fp.seek(info.header_offset + 26)  # lengths of name and extra field
    return info.header_offset + 30 + int(np.frombuffer(archive.fp.read(4), "<u2").sum())
