"""Find the files in a folder, a zip, a tar, or tars inside of a folder or tar (official ImageNet); see members.py.

Nothing is unpacked to disk and links inside of archives are not followed, so absolute names and '..' lead nowhere. A
tar has no table of contents: it is scanned once for the place of every file, which one pread then fetches.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from uvit_decay.data.members import DAMAGED, Found, open_file, open_zip
from uvit_decay.errors import UserError, one_line

_MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_UNPACK = {"gz": "gunzip", "bz2": "bunzip2", "xz": "unxz", "zst": "unzstd"}
_COMPRESSED_TAR = re.compile(r"\.(?:tar\.|t)(gz|bz2|xz|zst)$", re.IGNORECASE)

_PATIENCE = 3.0  # seconds after which a scan shows how far it is


def find(path: Path, extensions: Collection[str], classes: Collection[str] | None = None) -> Found:
    """The files with these (lower-case) extensions below a folder, links followed, or in a zip or tar; no hidden ones.

    Only where a folder or tar has none, the tars in it are opened; if some are named like `classes`, only those.
    Raises UserError: neither folder, zip nor tar, or unreadable, damaged, compressed, or an inner tar without files.
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
            with open_file(path / tar) as file:
                scan.inner(file, path, tar, number)
    return scan.found(path, tars)


def _find_in_tar(path: Path, extensions: Collection[str], classes: Collection[str] | None) -> Found:
    with open_file(path) as file:
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
    """Yield the names of all files below a folder, hidden folders left out; raise a UserError if one comes twice."""
    seen: dict[tuple[int, int], str] = {}
    waiting = ["."]
    try:
        while waiting:
            folder = waiting.pop()
            state = os.stat(path / folder)
            twin = seen.setdefault((state.st_dev, state.st_ino), folder)
            if twin != folder:  # else two links to their parent would lead round for ever
                raise UserError(f"{path}: a link makes {folder} and {twin} one folder: remove it")
            with os.scandir(path / folder) as entries:
                for entry in entries:
                    name = entry.name if folder == "." else f"{folder}/{entry.name}"
                    if not entry.is_dir():
                        yield name
                    elif not _hidden(entry.name):
                        waiting.append(name)
    except OSError as error:
        raise UserError(f"{path}: {one_line(error)}") from error


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
    with open_file(path) as file:
        head = file.read(512)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            _refuse_compressed(f"{path}: this", kind)
    return path.suffix.lower() == ".tar" or head[257:262] == b"ustar"


def _size(path: Path) -> int:
    with open_file(path) as file:
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
    except (*DAMAGED, MemoryError) as error:  # of a name that is said to be terabytes
        raise UserError(f"{where}: not a tar, or one that is damaged or cut short ({one_line(error)})") from error


def _check_end(file: BinaryIO, offset: int) -> None:
    """tarfile takes any block that is no header, and even the end of the file, for the end of the tar."""
    file.seek(offset)
    tail = file.read(2**20)
    if len(tail) < tarfile.BLOCKSIZE or any(tail[: tarfile.BLOCKSIZE]):
        raise tarfile.ReadError(f"neither a member nor an end mark at byte {offset}")
    if tail.strip(b"\0"):
        raise tarfile.ReadError(f"more data after the end mark at byte {offset}, as where tars were joined")
