"""Find the images in a folder, a zip or a tar, and read them by number.

Nothing is unpacked to disk and links inside archives are not followed, so absolute names and '..' are harmless. A tar
has no table of contents: it is scanned once for the offset of every file, which is then read with one pread.
"""

from __future__ import annotations

import lzma
import os
import stat
import struct
import sys
import tarfile
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from uvit_decay.files.writing import check_content
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.progress import track

# Exceptions of zipfile, tarfile and PIL on damaged bytes; fuzzing 20 formats raised no others.
DAMAGED = (OSError, SyntaxError, ValueError, RuntimeError, TypeError, LookupError, EOFError, OverflowError)
DAMAGED += (AssertionError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)

LARGEST = 2**29  # bytes of an unpacked image file; PIL's largest image takes less at 3 x 16 bits
ZIP_UTF8 = 0x800  # bit of a zip member's flags: its name is UTF-8
_PATIENCE = 3.0  # seconds after which a scan shows a progress bar


Kinds = tuple[tuple[str, int], ...]  # extensions in lower case, such as ".txt", and their numbers of files


class ArchiveIndex(NamedTuple):
    """Sorted names of files, '/' between folders; for a tar, row i of `spans` is (offset, size) in bytes.

    `others` counts the visible files that were left out, by extension, the most frequent one first.
    """

    names: tuple[str, ...]
    spans: np.ndarray | None = None  # int64 (n, 2)
    others: Kinds = ()

    def split(self, extensions: Collection[str]) -> tuple[ArchiveIndex, ArchiveIndex]:
        """Return the files with these extensions, and all others."""
        inside, outside = [], []
        for row, name in enumerate(self.names):
            rows = inside if os.path.splitext(name)[1].lower() in extensions else outside
            rows.append(row)
        return self.take(inside), self.take(outside)

    def take(self, rows: Sequence[int]) -> ArchiveIndex:
        """Return the files in these rows."""
        names = tuple(self.names[row] for row in rows)
        spans = None if self.spans is None else self.spans[list(rows)]
        return ArchiveIndex(names, spans, self.others)


def find(path: Path, extensions: Collection[str]) -> ArchiveIndex:
    """Find the files with these (lower-case) extensions in a folder, zip or tar, and count the others.

    Hidden files are neither found nor counted. Links in a folder are followed. Archives inside a folder or an archive
    are not opened.
    """
    if path.is_dir():
        return _choose(_folder_names(path), extensions)
    with open_file(path) as file:
        header = file.read(tarfile.BLOCKSIZE)
    check_content(path, header)
    if path.suffix.lower() == ".tar" or header[257:262] == b"ustar":
        return _find_in_tar(path, extensions)
    return _choose((name for name in _open_zip(path).members if not name.endswith("/")), extensions)


def _choose(names: Iterable[str], extensions: Collection[str]) -> ArchiveIndex:
    """Return the sorted names of the visible files with these extensions, each name once, and count the others."""
    chosen = set()
    others: Counter[str] = Counter()
    for name in names:
        extension = _extension(name)
        if extension in extensions:
            chosen.add(name)
        elif extension is not None:
            others[extension] += 1
    return ArchiveIndex(tuple(sorted(chosen)), others=tuple(others.most_common()))


def _extension(name: str) -> str | None:
    """Return the extension of a visible file in lower case, such as ".png"; None for a hidden file."""
    return None if _is_hidden(name) else os.path.splitext(name)[1].lower()


def _is_hidden(name: str) -> bool:
    """Return whether a name is hidden, added by macOS (__MACOSX, ._x.jpg) or outside the archive ('..')."""
    return any(part == "__MACOSX" or (part.startswith(".") and part != ".") for part in name.split("/"))


def _folder_names(path: Path) -> Iterator[str]:
    """Yield all files below a folder except in hidden folders; raise a UserError if a folder is reached twice."""
    seen: dict[tuple[int, int], str] = {}
    waiting = ["."]
    while waiting:
        folder = waiting.pop()
        with explain(path, OSError), os.scandir(path / folder) as entries:
            state = os.stat(path / folder)
            twin = seen.setdefault((state.st_dev, state.st_ino), folder)
            if twin != folder:  # otherwise a walk with two links to a parent would not end
                raise UserError(f"{path}: {folder} and {twin} are one folder because of a link; remove the link")
            for entry in entries:
                name = entry.name if folder == "." else f"{folder}/{entry.name}"
                if not entry.is_dir():
                    yield name
                elif not _is_hidden(entry.name):
                    waiting.append(name)


def _find_in_tar(path: Path, extensions: Collection[str]) -> ArchiveIndex:
    """Find files as `find` does, by the offsets of the standard library; of a name that comes twice the last counts."""
    spans: dict[str, tuple[int, int]] = {}
    others: Counter[str] = Counter()
    links = 0
    # MemoryError: a header claims a name of terabytes
    damage = explain(f"{path}: not a tar, or a compressed, damaged or cut short one", *DAMAGED, MemoryError)
    progress = track(f"scanning {path.name}", None, "file", delay=_PATIENCE)
    with open_file(path) as file, damage, tarfile.open(fileobj=file, mode="r:") as archive, progress as work:
        while (entry := archive.next()) is not None:
            work.update()
            archive.members.clear()  # tarfile keeps every member: 1 GB for a million files
            if not 0 <= entry.size < 2**62:  # a negative size would make tarfile loop endlessly
                raise tarfile.ReadError(f"a size of {entry.size} bytes")
            extension = _extension(entry.name)
            if extension in extensions and entry.isreg():
                spans[entry.name] = (entry.offset_data, entry.size)
            elif extension in extensions and (entry.issym() or entry.islnk()):
                links += 1
            elif extension is not None and entry.isreg():
                others[extension] += 1
        file.seek(archive.offset)
        # tarfile takes any block that is not a header, and the end of the file, for the end of the tar.
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no member and no end mark at byte {archive.offset}")
    if links:
        hint = "to include their files, pack with --dereference --hard-dereference"
        print(f"{path}: {links} links left out; {hint}", file=sys.stderr)
    names = tuple(sorted(spans))
    places = [spans[name] for name in names]
    return ArchiveIndex(names, np.array(places, np.int64).reshape(-1, 2), tuple(others.most_common()))


@contextmanager
def open_members(path: Path, index: ArchiveIndex) -> Iterator[Callable[[int], BytesIO]]:
    """Yield a thread-safe function that returns the contents of file i.

    The UserErrors of this function begin with the name of the file or with a path.
    """
    tar = shared_zip = None
    with ExitStack() as stack:
        if index.spans is not None:
            tar = stack.enter_context(open_file(path))
        elif not path.is_dir():
            shared_zip = _open_zip(path)

        def fetch(i: int) -> BytesIO:
            with explain(index.names[i], *DAMAGED):
                if tar is not None:
                    offset, size = index.spans[i].tolist()
                    return BytesIO(_read_span(tar, offset, size))
                if shared_zip is not None:
                    return BytesIO(shared_zip.read(index.names[i]))
                with open_file(path / index.names[i]) as file:
                    return BytesIO(_read_span(file, 0, os.fstat(file.fileno()).st_size))

        yield fetch


def file_states(path: Path, index: ArchiveIndex, chosen: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the size in bytes of each file at the indices `chosen`, in a zip also its CRC-32; no file is read."""
    if index.spans is not None:
        sizes = index.spans[list(chosen), 1].tolist()
        return [(size,) for size in sizes]
    if path.is_dir():
        with explain(f"{path} has changed", OSError):
            return [(os.stat(path / index.names[i]).st_size,) for i in chosen]
    in_zip = _open_zip(path).members
    members = [in_zip[index.names[i]] for i in chosen]
    return [(member.file_size, member.CRC) for member in members]


def _read_span(file: BinaryIO, offset: int, size: int) -> bytes:
    """Return the bytes of a file at an offset, without moving its position, which threads share."""
    _check_size(size)
    data = os.pread(file.fileno(), size, offset)
    if len(data) < size:
        raise EOFError("the file has become shorter since it was listed")
    return data


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"{size:,} bytes, more than the {LARGEST:,} that an image may have")


class _SharedZip:
    """A zip for several threads: the lock protects the file position and the reference count of `archive`.

    `members` has all files by name, see `_member_name`.
    """

    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path)
        self.lock = threading.Lock()
        self.members = {_member_name(member): member for member in self.archive.infolist()}

    def read(self, name: str) -> bytes:
        """Return the contents of a member; raise a ValueError if it is too large for an image."""
        member = self.members[name]
        _check_size(member.file_size)  # zipfile unpacks no more than this
        with self.lock:
            return self.archive.read(member)


def _member_name(member: zipfile.ZipInfo) -> str:
    """Return the name of a member, with '/' between folders also where PowerShell and older .NET wrote a backslash.

    `zip` and macOS write UTF-8 without the flag that says so, and zipfile then decodes it as code page 437.
    """
    name = member.filename
    if not member.flag_bits & ZIP_UTF8:
        with suppress(UnicodeError):  # it is not UTF-8: an old program's name
            name = name.encode("cp437").decode()
    return name.replace("\\", "/")


def _open_zip(path: Path) -> _SharedZip:
    """Return the zip, cached because opening a zip of 50,000 files takes about a second."""
    what = f"{path}: neither a folder nor a tar without compression, and not a zip, or one that is cut short"
    with explain(what, zipfile.BadZipFile, OSError, struct.error, ValueError, RuntimeError):
        state = path.stat()
        # The key includes the process: a forked worker must not share its parent's file position or lock.
        return _open_cached_zip(path, os.getpid(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _open_cached_zip(path: Path, process: int, changed: int, size: int) -> _SharedZip:
    return _SharedZip(path)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file; raise a UserError for any other, such as a FIFO, where `open` would wait for a writer."""
    with explain(path, OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("not a regular file")
        return open(path, "rb")
