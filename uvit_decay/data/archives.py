"""Files in a folder, a zip, a tar, or tars inside of a folder or tar (official ImageNet): find them, read their bytes.

Nothing is unpacked to disk and links inside of archives are not followed, so absolute names and '..' lead nowhere. A
tar has no table of contents: it is scanned once for the place of every file, which one pread then fetches.
"""

from __future__ import annotations

import lzma
import os
import re
import struct
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from uvit_decay.errors import UserError, one_line

# What zipfile, tarfile and PIL raised on damaged bytes; a fuzz over 20 formats met no other.
DAMAGED = (OSError, SyntaxError, ValueError, RuntimeError, TypeError, LookupError, EOFError, OverflowError)
DAMAGED += (struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)

_MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_UNPACK = {"gz": "gunzip", "bz2": "bunzip2", "xz": "unxz", "zst": "unzstd"}
_COMPRESSED_TAR = re.compile(r"\.(?:tar\.|t)(gz|bz2|xz|zst)$", re.IGNORECASE)

_PATIENCE = 3.0  # seconds after which a scan shows how far it is


class Found(NamedTuple):
    """Sorted names of files, '/' between folders; row i of `spans`, for tars, is (index in `tars`, offset, size).

    `tars` are relative to the searched path, "" for a tar itself. What lies in an inner x.tar is named x/..., as if it
    had been unpacked into a folder of that name.
    """

    names: tuple[str, ...]
    tars: tuple[str, ...] = ()
    spans: np.ndarray | None = None  # int64 (n, 3)


def find(path: Path, extensions: Collection[str], classes: Collection[str] | None = None) -> Found:
    """The files with these (lower-case) extensions below a folder, links followed, or in a zip or tar; no hidden ones.

    Only where a folder or tar has none, the tars in it are opened; if some are named like `classes`, only those.
    Raises UserError: neither folder, zip nor tar, or unreadable, damaged, compressed, or an inner tar without files.
    """
    if path.is_dir():
        return _find_in_folder(path, extensions, classes)
    if _is_tar(path):
        return _find_in_tar(path, extensions, classes)
    return Found(_chosen(_open_zip(path).archive.namelist(), extensions))


def _chosen(names: Iterable[str], extensions: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in names if _extension(name) in extensions and not _hidden(name)}))


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _hidden(name: str) -> bool:
    """Also what macOS adds (__MACOSX, ._x.jpg) and anything outside of the archive ('..')."""
    return any(part == "__MACOSX" or (part.startswith(".") and part != ".") for part in name.split("/"))


def _find_in_folder(path: Path, extensions: Collection[str], classes: Collection[str] | None) -> Found:
    names = list(_folder_names(path))
    if chosen := _chosen(names, extensions):
        return Found(chosen)
    tars = _inner_tars(path, names, classes)
    with _bar(path, sum(_size(path / tar) for tar in tars)) as bar:
        scan = _Scan(extensions, bar)
        for number, tar in enumerate(tars):
            with _open(path / tar) as file:
                scan.inner(file, path, tar, number)
    return scan.found(path, tars)


def _find_in_tar(path: Path, extensions: Collection[str], classes: Collection[str] | None) -> Found:
    with _open(path) as file:
        with _bar(path, _size(path)) as bar:
            scan = _Scan(extensions, bar)
            scan.add(file, path)
        if scan.places:
            return scan.found(path, [""])
        tars = _inner_tars(path, scan.others, classes)
        entries = [scan.others[tar] for tar in tars]
        file.seek(0)
        total = sum(entry.size for entry in entries)
        with tarfile.open(fileobj=file, mode="r:") as archive, _bar(path, total) as scan.bar:
            for tar, entry in zip(tars, entries, strict=True):
                scan.inner(archive.extractfile(entry), path, tar, 0, start=entry.offset_data)
    return scan.found(path, [""])


def _folder_names(path: Path) -> Iterator[str]:
    def stop(error: OSError) -> None:  # os.walk would leave an unreadable folder out without a word
        raise UserError(f"{path}: {one_line(error)}")

    for folder, _, files in os.walk(path, onerror=stop, followlinks=True):
        inside = Path(folder).relative_to(path).as_posix()
        yield from files if inside == "." else (f"{inside}/{file}" for file in files)


def _inner_tars(path: Path, names: Iterable[str], classes: Collection[str] | None) -> list[str]:
    """The tars among the files of a folder or tar. UserError if one is compressed."""
    for name in sorted(names):
        if (match := _COMPRESSED_TAR.search(name)) and not _hidden(name):
            _refuse_compressed(f"{path}: {name} in it", match[1].lower())
    tars = _chosen(names, {".tar"})
    # the classes of ImageNet-100 are a tenth of the tars of ImageNet, and so is the time that the scan takes
    return [tar for tar in tars if PurePosixPath(tar).stem in (classes or ())] or list(tars)


def _refuse_compressed(what: str, kind: str) -> None:
    why = "pictures are read in random order, which needs a tar that is not compressed"
    raise UserError(f"{what} is compressed ({kind}); {why}: unpack it with {_UNPACK[kind]}")


def _is_tar(path: Path) -> bool:
    with _open(path) as file:
        head = file.read(512)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            _refuse_compressed(f"{path}: this", kind)
    return path.suffix.lower() == ".tar" or head[257:262] == b"ustar"


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or one_line(error)}") from error


def _size(path: Path) -> int:
    with _open(path) as file:
        return os.fstat(file.fileno()).st_size


def _bar(path: Path, total: int) -> tqdm:
    return tqdm(desc=f"scanning {path.name}", total=total, unit="B", unit_scale=True, delay=_PATIENCE)


class _Scan:
    """Where the files with the given extensions are in the tars that were added; `others` are the remaining ones."""

    def __init__(self, extensions: Collection[str], bar: tqdm) -> None:
        self.extensions, self.bar = extensions, bar
        self.places: dict[str, tuple[int, int, int]] = {}  # of a name that comes twice the last counts, as for tar
        self.others: dict[str, tarfile.TarInfo] = {}
        self.links = 0

    def add(self, file: BinaryIO, where: Path, prefix: str = "", number: int = 0, start: int = 0) -> None:
        """An open tar that begins at byte `start` of tar `number`."""
        for entry in _entries(file, where, self.bar):
            name = prefix + entry.name
            chosen = _extension(name) in self.extensions
            if _hidden(name) or not (chosen or entry.isreg()):
                continue
            if entry.issparse():
                raise UserError(f"{where}: {entry.name} is stored in pieces; pack it again without tar's --sparse")
            if not chosen:
                self.others[name] = entry
            elif entry.isreg():
                self.places[name] = (number, start + entry.offset_data, entry.size)
            elif entry.issym() or entry.islnk():
                self.links += 1

    def inner(self, file: BinaryIO, path: Path, tar: str, number: int, start: int = 0) -> None:
        before = len(self.places)
        self.add(file, path / tar, tar[: -len(".tar")] + "/", number, start)
        if len(self.places) == before:
            raise UserError(f"{path / tar}: no pictures directly in this tar; if it holds further tars, point at it")

    def found(self, path: Path, tars: list[str]) -> Found:
        if self.links:
            mend = "pack them with tar's --dereference --hard-dereference"
            print(f"{path}: {self.links} links left out, only files in a tar are read; {mend}", file=sys.stderr)
        names = tuple(sorted(self.places))
        spans = np.array([self.places[name] for name in names], dtype=np.int64).reshape(-1, 3)
        return Found(names, tuple(tars), spans)


def _entries(file: BinaryIO, where: Path, bar: tqdm) -> Iterator[tarfile.TarInfo]:
    """The members of a tar to its very end. UserError if it is damaged, cut short or not a tar."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            seen = 0
            while (entry := archive.next()) is not None:
                archive.members.clear()  # tarfile remembers all of them: a gigabyte for a million pictures
                if entry.size < 0:  # tarfile would go round in circles
                    raise tarfile.ReadError("a size below 0")
                bar.update(archive.offset - seen)
                seen = archive.offset
                yield entry
            _check_end(file, archive.offset)
    except DAMAGED as error:
        raise UserError(f"{where}: not a tar, or one that is damaged or cut short ({one_line(error)})") from error


def _check_end(file: BinaryIO, offset: int) -> None:
    """tarfile takes any block that is no header, and even the end of the file, for the end of the tar."""
    file.seek(offset)
    tail = file.read(2**20)
    if len(tail) < tarfile.BLOCKSIZE or any(tail[: tarfile.BLOCKSIZE]):
        raise tarfile.ReadError(f"neither a member nor an end mark at byte {offset}")
    if tail.strip(b"\0"):
        raise tarfile.ReadError(f"more data after the end mark at byte {offset}, as where tars were joined")


@contextmanager
def opened(path: Path, found: Found) -> Iterator[Callable[[int], bytes]]:
    """A function for any number of threads that reads file i; what it raises is in DAMAGED."""
    names, tars, spans = found
    with ExitStack() as stack:
        if spans is None:
            yield _reader(path, names)
            return
        # of the many tars of a folder each is opened anew, as each picture would be: there are limits on open files
        shared = stack.enter_context(_open(path)) if tars == ("",) else None

        def read(i: int) -> bytes:
            number, offset, size = spans[i].tolist()
            if shared is not None:
                return _read_span(shared, offset, size)
            with open(path / tars[number], "rb", buffering=0) as own:
                return _read_span(own, offset, size)

        yield read


def _read_span(file: BinaryIO, offset: int, size: int) -> bytes:
    data = os.pread(file.fileno(), size, offset)
    if len(data) < size:
        raise EOFError("the tar has become shorter since it was scanned")
    return data


def _reader(path: Path, names: tuple[str, ...]) -> Callable[[int], bytes]:
    if path.is_dir():
        return lambda i: path.joinpath(names[i]).read_bytes()
    archive = _open_zip(path)
    return lambda i: archive.read(names[i])


class _Zip:
    """An open zip for many threads: they share one file position and one count of references, hence the lock."""

    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path)
        self.lock = threading.Lock()

    def read(self, member: str) -> bytes:
        with self.lock:
            return self.archive.read(member)


def _open_zip(path: Path) -> _Zip:
    """The zip, kept open for the next call, since to open one of 50,000 pictures takes about a second."""
    try:
        state = path.stat()
        return _open_zip_once(path, os.getpid(), state.st_mtime_ns, state.st_size)
    except (zipfile.BadZipFile, OSError, struct.error, ValueError) as error:
        if path.suffix.lower() == ".zip":
            raise UserError(f"{path}: not a zip, or one that is cut short ({one_line(error)})") from error
        raise UserError(f"{path}: neither a folder nor a zip or tar") from error


@lru_cache(maxsize=4)
def _open_zip_once(path: Path, process: int, modified: int, length: int) -> _Zip:
    """Keyed by the process too: a forked worker must not share its parent's file position or lock."""
    return _Zip(path)
