"""Download of one large file: verified by a known checksum, and complete or absent.

torch.hub fetches it. pooch decodes an archive that a server labels with Content-Encoding, so that its checksum is
another one, makes files that only their owner can read, and leaves files of random names when it is killed.
"""

from __future__ import annotations

import hashlib
import http.client
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Literal

from filelock import FileLock

from uvit_decay.files.writing import check_file, writing
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.progress import terminal_width

Algorithm = Literal["md5", "sha256"]


def checksum(path: Path, algorithm: Algorithm = "sha256") -> str:
    """Return the hexadecimal checksum of a file."""
    with path.open("rb") as file:
        # Machines in FIPS mode refuse md5 without usedforsecurity=False.
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def verify(path: Path, expected: str, algorithm: Algorithm = "sha256") -> None:
    """Raise a UserError with both values unless the checksum of the file begins with `expected`.

    A placeholder is named as such, see `check_content`.
    """
    with explain(f"cannot read {path}", OSError):
        check_file(path)
        actual = checksum(path, algorithm)
    if not actual.startswith(expected):
        reason = f"its {algorithm} is {actual}, expected {expected} ({path.stat().st_size:,} bytes)"
        raise UserError(f"{path} is not the file it should be: {reason}; move it away and fetch it again")


def download(url: str, target: Path, sha256: str, timeout: float = 30.0) -> None:
    """Fetch `url` to `target`, which is either complete and has this checksum or does not exist.

    An existing target is verified, and nothing is fetched. Processes that fetch the same target at once, on one machine
    or a shared disk, wait for the first.

    Args:
        url: http or https address.
        target: path of the file; missing folders are made.
        sha256: hexadecimal checksum of the whole file, or at least its first 8 digits.
        timeout: seconds without any byte after which the download fails.
    """
    if not target.exists():
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{target}.lock").acquire()  # its empty file is kept, since others may wait for it
        with lock:
            if not target.exists():  # another process may have fetched it meanwhile
                for remains in target.parent.glob(f".{escape(target.name)}.*.partial"):  # of killed programs
                    remains.unlink(missing_ok=True)
                _fetch(url, target, sha256, timeout)
    verify(target, sha256)


def _fetch(url: str, target: Path, sha256: str, timeout: float) -> None:
    """Fetch a file beside `target`, compare its checksum, and rename it."""
    from torch.hub import download_url_to_file

    print(f"downloading {url} to {target}", file=sys.stderr)
    partial = target.with_name(f".{target.name}.fetched.partial")
    hint = f"run again, or fetch it elsewhere and put it at {target}"
    # torch raises a RuntimeError for another SHA-256; errors of urllib and of the disk are OSErrors.
    with explain(f"cannot download {url}", OSError, RuntimeError, http.client.HTTPException, hint=hint):
        try:
            with _socket_timeout(timeout):
                download_url_to_file(url, str(partial), sha256, progress=terminal_width() > 0)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Limit how long new sockets wait for a byte in the body: torch.hub has no argument for it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
