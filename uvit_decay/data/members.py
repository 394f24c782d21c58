"""Read the bytes of files found in a folder, a zip or tars: regular files only, of at most LARGEST bytes each."""

from __future__ import annotations

import lzma
import os
import stat
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from uvit_decay.runtime.errors import explained

# Exceptions of zipfile, tarfile and PIL on damaged bytes; fuzzing 20 formats raised no others.
DAMAGED = (OSError, SyntaxError, ValueError, RuntimeError, TypeError, LookupError, EOFError, OverflowError)
DAMAGED += (AssertionError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)

LARGEST = 2**29  # bytes of an unpacked image file; PIL's largest image takes less at 3 x 16 bits


class Found(NamedTuple):
    """Sorted names of files, '/' between folders; for tars, row i of `spans` is (index in `tars`, offset, size).

    `tars` are relative to the searched path, "" if that path is the tar. Files in an inner x.tar are named x/..., as if
    it were unpacked into a folder of that name.
    """

    names: tuple[str, ...]
    tars: tuple[str, ...] = ()
    spans: np.ndarray | None = None  # int64 (n, 3)


@contextmanager
def opened(path: Path, found: Found) -> Iterator[Callable[[int], BytesIO]]:
    """Yield a thread-safe function that returns the contents of file i; its UserErrors start with the file's name."""
    names, tars, spans = found
    zipped = open_zip(path) if spans is None and not path.is_dir() else None
    # the tars of a folder are opened anew for each read: there may be more of them than files may be open
    with open_file(path) if tars == ("",) else nullcontext() as tar:

        def read(i: int) -> bytes:
            if zipped is not None:
                return zipped.read(names[i])
            if spans is None:
                return _read_file(path / names[i])
            number, offset, size = spans[i].tolist()
            return _read_file(path / tars[number], offset, size) if tar is None else _read_span(tar, offset, size)

        def fetch(i: int) -> BytesIO:
            with explained(names[i], *DAMAGED):
                return BytesIO(read(i))

        yield fetch


def _read_file(path: Path, offset: int = 0, size: int | None = None) -> bytes:
    with _open_regular(path) as file:
        return _read_span(file, offset, os.fstat(file.fileno()).st_size if size is None else size)


def _read_span(file: BinaryIO, offset: int, size: int) -> bytes:
    _check_size(size)
    data = os.pread(file.fileno(), size, offset)
    if len(data) < size:
        raise EOFError("the file has become shorter since it was listed")
    return data


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"{size:,} bytes, more than the {LARGEST:,} that an image may have")


class _Zip:
    """An open zip that threads may share: a lock protects its file position and its reference count."""

    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path)
        self.lock = threading.Lock()

    def read(self, member: str) -> bytes:
        """Return the bytes of a member; raise a ValueError if they are more than LARGEST."""
        _check_size(self.archive.getinfo(member).file_size)  # zipfile unpacks no more than this
        with self.lock:
            return self.archive.read(member)


def open_zip(path: Path) -> _Zip:
    """Return the open zip, cached because opening one of 50,000 files takes about a second."""
    named_zip = path.suffix.lower() == ".zip"
    what = "not a zip, or one that is cut short" if named_zip else "neither a folder nor a zip or tar"
    with explained(f"{path}: {what}", zipfile.BadZipFile, OSError, struct.error, ValueError, RuntimeError):
        state = path.stat()
        return _open_zip_once(path, os.getpid(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _open_zip_once(path: Path, process: int, modified: int, length: int) -> _Zip:
    """Open a zip, cached also by process: a forked worker must not share its parent's file position or lock."""
    return _Zip(path)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; raise a UserError if that fails."""
    with explained(path, OSError):
        return _open_regular(path)


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file; raise an OSError for any other, such as a FIFO, where open would wait for a writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("not a regular file")
    return open(path, "rb")
