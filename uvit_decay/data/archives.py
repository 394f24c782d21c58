"""Images in a folder, a zip, a tar, or tars inside a folder or tar (official ImageNet): found, and read by number.

Nothing is unpacked to disk and links inside archives are not followed, so absolute names and '..' are harmless. A tar
has no table of contents: it is scanned once for the offset of every file, which is then read with one pread.
"""

from __future__ import annotations

import lzma
import os
import re
import stat
import struct
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from uvit_decay.runtime.errors import UserError, explained

# Exceptions of zipfile, tarfile and PIL on damaged bytes; fuzzing 20 formats raised no others.
DAMAGED = (OSError, SyntaxError, ValueError, RuntimeError, TypeError, LookupError, EOFError, OverflowError)
DAMAGED += (AssertionError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)

LARGEST = 2**29  # bytes of an unpacked image file; PIL's largest image takes less at 3 x 16 bits
_PATIENCE = 3.0  # seconds after which a scan shows a progress bar
_MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_UNPACK = {"gz": "gunzip", "bz2": "bunzip2", "xz": "unxz", "zst": "unzstd"}
_COMPRESSED_TAR = re.compile(r"\.(?:tar\.|t)(gz|bz2|xz|zst)$", re.IGNORECASE)


class Found(NamedTuple):
    """Sorted names of files, '/' between folders; for tars, row i of `spans` is (index in `tars`, offset, size).

    `tars` are relative to the searched path, "" if that path is the tar. Files in an inner x.tar are named x/..., as if
    it were unpacked into a folder of that name.
    """

    names: tuple[str, ...]
    tars: tuple[str, ...] = ()
    spans: np.ndarray | None = None  # int64 (n, 3)


def find(path: Path, extensions: Collection[str], classes: Collection[str] | None = None) -> Found:
    """Find the files with these (lower-case) extensions in a folder, zip or tar; hidden files are left out.

    Links in a folder are followed. If a folder or tar has no such files itself, the tars in it are opened: those named
    after one of `classes`, or all if there are none.
    """
    if path.is_dir():
        return _find_in_folder(path, extensions, classes)
    if _is_tar(path):
        return _find_in_tar(path, extensions, classes)
    return Found(_chosen(open_zip(path).archive.namelist(), extensions))


def _chosen(names: Iterable[str], extensions: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in names if _extension(name) in extensions and not _hidden(name)}))


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _hidden(name: str) -> bool:
    """Return whether a name is hidden, added by macOS (__MACOSX, ._x.jpg) or outside the archive ('..')."""
    return any(part == "__MACOSX" or (part.startswith(".") and part != ".") for part in name.split("/"))


def _find_in_folder(path: Path, extensions: Collection[str], classes: Collection[str] | None) -> Found:
    names = list(_folder_names(path))
    if chosen := _chosen(names, extensions):
        return Found(chosen)
    tars, scan = _inner_tars(path, names, classes), _Scan(path, extensions)
    with explained(path, OSError):
        total = sum(os.path.getsize(path / tar) for tar in tars)
    with _bar(path, total) as bar:
        for number, tar in enumerate(tars):
            with open_file(path / tar) as file:
                scan.add_inner(file, bar, tar, number)
    return scan.result(tars)


def _find_in_tar(path: Path, extensions: Collection[str], classes: Collection[str] | None) -> Found:
    scan = _Scan(path, extensions)
    with open_file(path) as file:
        # First pass: the files directly in this tar. It also collects other regular files, such as tars.
        with _bar(path, os.path.getsize(path)) as bar:
            scan.add(file, bar)
        if scan.places:
            return scan.result([""])  # "": offsets are those in `path` itself
        # Second pass, if there are none: the tar holds a tar per class (official ImageNet), each at byte `start` of it.
        tars = {tar: scan.others[tar] for tar in _inner_tars(path, scan.others, classes)}
        file.seek(0)
        total = sum(entry.size for entry in tars.values())
        with tarfile.open(fileobj=file, mode="r:") as archive, _bar(path, total) as bar:
            for tar, entry in tars.items():
                scan.add_inner(archive.extractfile(entry), bar, tar, start=entry.offset_data)
    return scan.result([""])


def _folder_names(path: Path) -> Iterator[str]:
    """Yield all files below a folder except in hidden folders; raise a UserError if a folder is reached twice."""
    seen: dict[tuple[int, int], str] = {}
    waiting = ["."]
    while waiting:
        folder = waiting.pop()
        with explained(path, OSError), os.scandir(path / folder) as entries:
            state = os.stat(path / folder)
            twin = seen.setdefault((state.st_dev, state.st_ino), folder)
            if twin != folder:  # otherwise a walk with two links to a parent would not end
                raise UserError(f"{path}: a link makes {folder} and {twin} one folder: remove it")
            for entry in entries:
                name = entry.name if folder == "." else f"{folder}/{entry.name}"
                if not entry.is_dir():
                    yield name
                elif not _hidden(entry.name):
                    waiting.append(name)


def _inner_tars(path: Path, names: Iterable[str], classes: Collection[str] | None) -> list[str]:
    """Return the tars among `names`, those named after `classes` if any; raise a UserError if one is compressed."""
    for name in sorted(names):
        if (match := _COMPRESSED_TAR.search(name)) and not _hidden(name):
            _refuse_compressed(f"{path}: {name} in it", match[1].lower())
    tars = _chosen(names, {".tar"})
    # ImageNet-100 needs a tenth of ImageNet's tars: scanning only those takes a tenth of the time
    return [tar for tar in tars if PurePosixPath(tar).stem in (classes or ())] or list(tars)


def _refuse_compressed(what: str, kind: str) -> None:
    why = "images are read in random order, which needs a tar that is not compressed"
    raise UserError(f"{what} is compressed ({kind}); {why}: unpack it with {_UNPACK[kind]}")


def _is_tar(path: Path) -> bool:
    with open_file(path) as file:
        head = file.read(512)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            _refuse_compressed(f"{path}: this", kind)
    return path.suffix.lower() == ".tar" or head[257:262] == b"ustar"


def _bar(path: Path, total: int) -> tqdm:
    return tqdm(desc=f"scanning {path.name}", total=total, unit="B", unit_scale=True, delay=_PATIENCE)


class _Scan:
    """Places of the files with the given extensions in the scanned tars of `path`; `others`: the remaining members."""

    def __init__(self, path: Path, extensions: Collection[str]) -> None:
        self.path, self.extensions = path, extensions
        self.places: dict[str, tuple[int, int, int]] = {}  # (tar, offset, size); the last duplicate wins, as in tar
        self.others: dict[str, tarfile.TarInfo] = {}
        self.links = 0

    def add(self, file: BinaryIO, bar: tqdm, tar: str = "", number: int = 0, start: int = 0) -> None:
        """Add the members of an open tar, whose names are prefixed by x/ if it is x.tar; it begins at byte `start`."""
        where, prefix = self.path / tar, tar and tar[: -len(".tar")] + "/"
        for entry in _entries(file, where, bar):
            name = prefix + entry.name
            # Keep chosen names (links too, to count them) and all regular files; skip folders, devices, hidden names.
            chosen = _extension(name) in self.extensions
            if _hidden(name) or not (chosen or entry.isreg()):
                continue
            if not chosen:
                self.others[name] = entry
            elif entry.isreg():
                self.places[name] = (number, start + entry.offset_data, entry.size)
            elif entry.issym() or entry.islnk():
                self.links += 1

    def add_inner(self, file: BinaryIO, bar: tqdm, tar: str, number: int = 0, start: int = 0) -> None:
        """Add the members of an inner tar; raise a UserError if none has the extensions."""
        before = len(self.places)
        self.add(file, bar, tar, number, start)
        if len(self.places) == before:
            raise UserError(f"{self.path / tar}: no images directly in this tar; if it holds further tars, point at it")

    def result(self, tars: list[str]) -> Found:
        """Return the sorted names and their spans; print a remark if links were left out."""
        if self.links:
            hint = "pack them with tar's --dereference --hard-dereference"
            print(f"{self.path}: {self.links} links left out, only files in a tar are read; {hint}", file=sys.stderr)
        names = tuple(sorted(self.places))
        spans = np.array([self.places[name] for name in names], dtype=np.int64).reshape(-1, 3)
        return Found(names, tuple(tars), spans)


def _entries(file: BinaryIO, where: Path, bar: tqdm) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar up to its end mark; raise a UserError if it is damaged, truncated or not a tar."""
    # MemoryError: a header claims a name of terabytes
    damage = explained(f"{where}: not a tar, or one that is damaged or cut short", *DAMAGED, MemoryError)
    with damage, tarfile.open(fileobj=file, mode="r:") as archive:
        seen = 0
        while (entry := archive.next()) is not None:
            archive.members.clear()  # tarfile keeps every member: 1 GB for a million files
            if not 0 <= entry.size < 2**62:  # with one below 0 tarfile would loop endlessly
                raise tarfile.ReadError(f"a size of {entry.size} bytes")
            bar.update(archive.offset - seen)
            seen = archive.offset
            yield entry
        file.seek(archive.offset)
        # tarfile takes any block that is not a header, and the end of the file, for the end of the tar.
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"neither a member nor an end mark at byte {archive.offset}")


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
