"""Download of one large file: resumable, verified by a known checksum, and complete or absent."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

from filelock import AcquireReturnProxy, FileLock
from tqdm import tqdm

from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.files import writing

Algorithm = Literal["md5", "sha256"]

_CHUNK = 1 << 18


def checksum(path: Path, algorithm: Algorithm = "sha256") -> str:
    """Return the hexadecimal checksum of a file."""
    with path.open("rb") as file:
        # Machines in FIPS mode refuse md5 without usedforsecurity=False.
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def agrees(actual: str, expected: str) -> bool:
    """Return whether a checksum begins with `expected`: names of torch's files hold only the first 8 digits.

    Raises:
        ValueError: fewer than 8 digits, which would let other files pass.
    """
    if len(expected) < 8:
        raise ValueError(f"{expected!r} is too short for a checksum, 8 digits at least")
    return actual.startswith(expected)


def verify(path: Path, expected: str, algorithm: Algorithm = "sha256") -> None:
    """Raise a UserError with both values unless the checksum of the file begins with `expected`."""
    with explained(f"cannot read {path}", OSError):
        actual = checksum(path, algorithm)
    if not agrees(actual, expected):
        size = f"{path.stat().st_size:,} bytes"
        reason = f"its {algorithm} is {actual}, expected {expected} ({size}: cut short, or another file)"
        raise UserError(f"{path} is not the file it should be: {reason}; move it away and fetch it again")


def download(url: str, target: Path, expected: str, algorithm: Algorithm = "sha256", timeout: float = 30.0) -> None:
    """Fetch `url` to `target`, which is either complete and has the `expected` checksum or does not exist.

    An existing target is verified, and nothing is fetched. Until it is complete the file is named `<target>.partial`;
    it is kept when the network fails, and the next call resumes it. Processes that fetch the same target at once, on
    one machine or a shared disk, wait for the first.

    Args:
        url: http or https address.
        target: path of the file; missing folders are made.
        expected: hexadecimal checksum of the whole file, or at least its first 8 digits.
        algorithm: algorithm of the checksum.
        timeout: seconds without any byte after which the download fails.
    """
    if not target.exists():
        partial = target.with_name(target.name + ".partial")
        with _lock(target):
            if not target.exists():  # another process may have fetched it meanwhile
                _complete(url, partial, target, expected, algorithm, timeout)
                os.replace(partial, target)
    verify(target, expected, algorithm)


def _lock(target: Path) -> AcquireReturnProxy:
    """Acquire the lock of `target`, waiting for other processes; raise a UserError if it cannot be written.

    The empty <target>.lock is kept, since other processes may be waiting for it.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{target}.lock").acquire()


def _complete(url: str, partial: Path, target: Path, expected: str, algorithm: Algorithm, timeout: float) -> None:
    """Complete and verify `partial`; nothing is fetched if it is complete already."""
    if partial.exists() and agrees(checksum(partial, algorithm), expected):
        return
    _fetch(url, partial, target, timeout)
    actual = checksum(partial, algorithm)
    if not agrees(actual, expected):
        partial.unlink()
        reason = f"the {algorithm} of what came is {actual}, expected {expected}"
        raise UserError(f"{url}: {reason}; it was removed, run again to fetch it anew")


def _fetch(url: str, partial: Path, target: Path, timeout: float) -> None:
    """Fetch the rest of `partial`, or all if the server cannot resume; raise a UserError if the network fails."""
    hint = f"run again to go on where it stopped, or fetch it elsewhere and put it at {target}"
    # Errors of urllib and of the disk are OSErrors.
    with explained(f"cannot download {url}", OSError, http.client.HTTPException, hint=hint):
        have = partial.stat().st_size if partial.exists() else 0
        with _open(url, have, timeout) as response:
            _append(response, partial, have, target.name)


def _open(url: str, have: int, timeout: float) -> http.client.HTTPResponse:
    """Return the response for the bytes from `have` on, or for the whole file."""
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        error.close()  # the partial file is too long or wrong: start again
        return _open(url, 0, timeout)
    except urllib.error.URLError as error:
        raise OSError(error.reason) from error  # without its "<urlopen error"


def _append(response: http.client.HTTPResponse, partial: Path, have: int, name: str) -> None:
    """Append the body to the `have` bytes of `partial`, or replace them if the server sends the whole file.

    Raises:
        OSError: the server sent another range, or fewer bytes than announced.
    """
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        have = 0  # the server sends the whole file
    elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        raise OSError(f"asked for the bytes from {have} on, got {response.headers.get('Content-Range')}")
    total = None if response.length is None else have + response.length
    bar = tqdm(desc=name, total=total, initial=have, unit="B", unit_scale=True, unit_divisor=1024)
    with bar, partial.open("ab" if have else "wb") as file:
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            bar.update(len(chunk))
        size = file.tell()
    if total is not None and size != total:
        raise OSError(f"the connection broke off after {size:,} of {total:,} bytes")
