"""Writing files: found impossible before the work, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

from uvit_decay.errors import UserError, one_line


def check_writable(path: Path, folder: bool = False) -> None:
    """Raise a UserError now if `path` cannot be written later: before the work, not after. Makes missing folders.

    Several processes may ask at once.
    """
    target = path if folder else path.parent
    try:
        target.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=target, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    if not folder and path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` once it is complete: a crash leaves the old one or the new one.

    Raises:
        UserError: it cannot be written, for instance because the disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or one_line(error)}") from error
