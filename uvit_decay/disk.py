"""Writing files: found impossible before the work, one program at a time, and whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from uvit_decay.errors import UserError, one_line


def at_home(path: str | Path) -> Path:
    """Return `path` with ~ and ~user as their home folder; the ~ of an unknown user is left to be not found."""
    return Path(os.path.expanduser(path))


def check_writable(path: Path, folder: bool = False) -> None:
    """Raise a UserError now if `path` cannot be written later: before the work, not after. Makes missing folders.

    Several processes may ask at once.
    """
    target = path if folder else path.parent
    with writing(path):
        target.mkdir(parents=True, exist_ok=True)
        trial = _partial(target / ("file" if folder else path.name))
        trial.open("xb").close()
        trial.unlink()
    if not folder and path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full disk, a limit or a missing right raises in the body into a UserError that names `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):  # torch.save raises a RuntimeError from it
            cause = cause.__context__
        if cause is None:
            raise
        raise UserError(f"cannot write {path}: {cause.strerror or one_line(cause)}") from error


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` once it is complete: a crash leaves the old one or the new one.

    Until then it lies beside `path` under a name of its own, which only a kill leaves behind. Without `sync` a failure
    of power, but no kill, may cut the file short: for thousands of small files, which the disk would take 3 ms each.

    Raises:
        UserError: it cannot be written, for instance because the disk is full.
    """
    partial = _partial(path)
    with writing(path):
        try:
            with partial.open("xb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def claimed(path: Path, first: bool = True) -> Iterator[None]:
    """Keep other programs that claim the file or folder `path` from writing it meanwhile.

    What killed programs have left of a file is removed. Of a program's processes the `first` claims for all.

    Raises:
        UserError: another program is writing it, or it cannot be written.
    """
    if not first:
        yield
        return
    lock = FileLock(path / ".lock" if path.is_dir() else path.parent / f".{path.name}.lock")
    with writing(path):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            reason = "wait for its end, or choose another name"
            raise UserError(f"another program is writing {path}: {reason}") from None
    try:
        if not path.is_dir():
            remove_remains(path.parent, escape(path.name))
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is held: whoever waits finds it gone, and makes another
        lock.release()


def remove_remains(folder: Path, names: str = "*") -> None:
    """Remove what killed programs have left of files of these `names`, a glob, in a folder that is claimed."""
    for partial in folder.glob(f".{names}.????????.partial"):
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
