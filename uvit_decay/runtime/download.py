"""Download of one large file: verified by a known checksum, and complete or absent."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import urllib.request
from glob import escape
from pathlib import Path
from typing import Literal

from filelock import FileLock
from tqdm import tqdm

from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.files import remove_remains, replacing, writing

Algorithm = Literal["md5", "sha256"]


def checksum(path: Path, algorithm: Algorithm = "sha256") -> str:
    """Return the hexadecimal checksum of a file."""
    with path.open("rb") as file:
        # Machines in FIPS mode refuse md5 without usedforsecurity=False.
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def verify(path: Path, expected: str, algorithm: Algorithm = "sha256") -> None:
    """Raise a UserError with both values unless the checksum of the file begins with `expected`."""
    with explained(f"cannot read {path}", OSError):
        actual = checksum(path, algorithm)
    if not actual.startswith(expected):
        reason = f"its {algorithm} is {actual}, expected {expected} ({path.stat().st_size:,} bytes)"
        raise UserError(f"{path} is not the file it should be: {reason}; move it away and fetch it again")


def download(url: str, target: Path, expected: str, algorithm: Algorithm = "sha256", timeout: float = 30.0) -> None:
    """Fetch `url` to `target`, which is either complete and has the `expected` checksum or does not exist.

    An existing target is verified, and nothing is fetched. Processes that fetch the same target at once, on one machine
    or a shared disk, wait for the first.

    Args:
        url: http or https address.
        target: path of the file; missing folders are made.
        expected: hexadecimal checksum of the whole file, or at least its first 8 digits.
        algorithm: algorithm of the checksum.
        timeout: seconds without any byte after which the download fails.
    """
    if not target.exists():
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{target}.lock").acquire()  # its empty file is kept, since others may wait for it
        with lock:
            if not target.exists():  # another process may have fetched it meanwhile
                remove_remains(target.parent, escape(target.name))
                _fetch(url, target, expected, algorithm, timeout)
    verify(target, expected, algorithm)


def _fetch(url: str, target: Path, expected: str, algorithm: Algorithm, timeout: float) -> None:
    hint = f"run again, or fetch it elsewhere and put it at {target}"
    # Errors of urllib and of the disk are OSErrors.
    failed = explained(f"cannot download {url}", OSError, http.client.HTTPException, hint=hint)
    with replacing(target) as file, failed, urllib.request.urlopen(url, timeout=timeout) as response:
        with tqdm.wrapattr(response, "read", total=response.length, desc=target.name) as source:
            shutil.copyfileobj(source, file)
        file.flush()
        if not (actual := checksum(Path(file.name), algorithm)).startswith(expected):
            raise OSError(f"{file.tell():,} bytes came, whose {algorithm} is {actual}, expected {expected}")
