"""Damage that happens to files of every kind: of their bytes, and of what lies under their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

Mutation = Callable[[bytes, Random], bytes]
OTHERS = (b"text\n", b"\x89PNG\r\n\x1a\n", b"PK\5\6" + bytes(18), b"\x1f\x8b\b\0", b"<!DOCTYPE html>", bytes(100))


def span(data: bytes, random: Random, most: int = 200) -> tuple[int, int]:
    """Return the ends of a random piece, half of the time near the beginning or the end, where headers are."""
    size = random.randint(1, min(most, len(data)))
    last = len(data) - size
    start = random.choice(
        (random.randint(0, last), random.randint(0, min(last, 300)), max(0, last - random.randint(0, 300)))
    )
    return start, start + size


def flip_bit(data: bytes, random: Random) -> bytes:
    start, _ = span(data, random, 1)
    return data[:start] + bytes([data[start] ^ (1 << random.randrange(8))]) + data[start + 1 :]


def truncate(data: bytes, random: Random) -> bytes:
    return data[: span(data, random)[0]]


def remove(data: bytes, random: Random) -> bytes:
    start, end = span(data, random)
    return data[:start] + data[end:]


def zero_run(data: bytes, random: Random) -> bytes:
    start, end = span(data, random)
    return data[:start] + bytes(end - start) + data[end:]


def append(data: bytes, random: Random) -> bytes:
    return data + random.randbytes(random.choice((1, 100, 70_000)))


def empty(data: bytes, random: Random) -> bytes:
    return b""


def another_kind(data: bytes, random: Random) -> bytes:
    """Return a small file of another kind, such as a server's error page instead of the file."""
    return random.choice(OTHERS)


BYTES: tuple[Mutation, ...] = (flip_bit, flip_bit, flip_bit, truncate, truncate, remove, zero_run)
BYTES += (append, empty, another_kind)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    """Extend the file to a terabyte without taking space on the disk."""
    os.truncate(path, 2**40)


PLACES: tuple[Callable[[Path], None], ...] = (Path.unlink, folder, pipe, loop, endless, sparse)
