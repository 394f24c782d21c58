"""Files, checked before the work: those that are read, and those that are written, atomically and by one program."""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from uvit_decay.terminal.errors import UserError, one_line

LOCK = ".lock"  # in a claimed folder
# Placeholders that stand in place of a file: a Git LFS pointer, or the web page of a failed download.
PAGE = 256  # bytes at the start of a file that reveal a placeholder
# First line of a pointer, by git-lfs' docs/spec.md: the current URL, and the URL of the first versions.
POINTERS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
WEB_PAGE = re.compile(rb"\s*<[!?a-zA-Z]")  # the length at the start of a .safetensors can have the bytes of " <"


def at_home(path: str | Path) -> Path:
    """Return `path` with ~ and ~user replaced by the home folder; ~user of an unknown user stays."""
    return Path(os.path.expanduser(path))


def check_is_file(path: Path) -> None:
    """Raise a UserError unless `path` is a file: opening a pipe would wait for its writer."""
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        if path.is_dir():
            state = "is a folder, not a file; name a file in it, such as checkpoints/last.ckpt of a run"
        raise UserError(f"cannot read {path}: it {state}")


def check_content(name: Path | str, start: bytes) -> None:
    """Raise a UserError if a binary file that begins with the bytes `start` is a placeholder.

    Args:
        name: path of the file, for the message.
        start: the first `PAGE` bytes, or more.
    """
    if start.startswith(POINTERS):
        raise UserError(f"{name} is a Git LFS pointer, not the file itself: run git lfs pull in its repository")
    if WEB_PAGE.match(start):
        raise UserError(f"{name} is a web page, not the file itself: the download failed, fetch it again")


def check_file(path: Path) -> None:
    """Raise a UserError if a file is a placeholder or no regular file; an OSError if it cannot be read."""
    check_is_file(path)
    with path.open("rb") as file:
        check_content(path, file.read(PAGE))


def quote_path(path: str | Path) -> str:
    """Return a path as it is typed in a command, in quotes if it has spaces or other special characters."""
    return shlex.quote(str(path))


def cache_folder(name: str) -> Path:
    """Return the folder `name` of this package's cache, in $XDG_CACHE_HOME or ~/.cache; it may not exist yet."""
    return at_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "uvit_decay" / name


def check_writable(path: Path, folder: bool = False, make: bool = True) -> None:
    """Raise a UserError if `path`, a file or a `folder`, cannot be written; call this before the work.

    Makes missing folders, or with `make=False` only checks that they can be made. Several processes may call this at
    once.
    """
    parent = path if folder else path.parent
    with writing(path):
        if make:
            parent.mkdir(parents=True, exist_ok=True)
        while not parent.exists():
            parent = parent.parent
        trial = _partial(parent / ("file" if folder else path.name))
        trial.open("xb").close()
        trial.unlink()
    if not folder and path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")


def list_missing(folder: Path) -> list[Path]:
    """Return those of a folder and its parents that do not exist, the folder first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk, a limit or a missing permission into a UserError that names `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):  # torch.save raises a RuntimeError from the OSError
            cause = cause.__context__
        if cause is None or isinstance(cause, BrokenPipeError):  # only a closed output raises it, no file
            raise
        raise UserError(f"cannot write {path}: {cause.strerror or one_line(cause)}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the context ends without error: a crash leaves the old or the new file.

    Until then it has a unique name beside `path`. Only a killed process leaves it there.
    """
    partial = _partial(path)
    with writing(path):
        try:
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


class Claimed(UserError):
    """Another program is writing the same file or folder."""


@contextmanager
def claim_paths(*paths: Path, first: bool = True, wait: float = 0.0) -> Iterator[None]:
    """Hold exclusive locks on writing files or folders; a process that ends in any way holds none.

    Only the `first` of several processes takes them. Partial files of a file that killed programs have left are
    removed; for partial files in a folder see `remove_remains`.

    Args:
        paths: files or folders.
        first: whether this process takes the locks.
        wait: how long to wait for each lock, in seconds.

    Raises:
        Claimed: another program holds one of the locks.
    """
    with ExitStack() as claims:
        if first:
            for path in paths:
                claims.enter_context(_claim(path, wait))
        yield


@contextmanager
def _claim(path: Path, wait: float) -> Iterator[None]:
    if path.is_dir():
        lock = FileLock(path / LOCK)
    else:
        lock = FileLock(path.parent / f".{path.name}.lock")
    with writing(path):
        try:
            lock.acquire(timeout=wait)
        except Timeout:
            reason = "wait for its end, or choose another name"
            raise Claimed(f"another program is writing {path}: {reason}") from None
    try:
        if not path.is_dir():
            remove_remains(path.parent, escape(path.name))
        yield
    finally:
        with suppress(OSError):  # the disk has become read-only; the file without its lock does no harm
            Path(lock.lock_file).unlink()  # while it is held, so that another program creates a new one
        lock.release()


def remove_remains(folder: Path, names: str = "*") -> None:
    """Remove partial files that killed programs left in a claimed folder; `names` is a glob of their targets.

    Folders with such names stay.
    """
    for partial in folder.glob(f".{names}.????????.partial"):
        if not partial.is_dir():
            partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
