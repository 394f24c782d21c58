"""Mutations that know nothing of the format: of the bytes of a file, and of what lies under its name."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

Mutation = Callable[[bytes, Random], bytes]
HUGE = (0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1)
NUMBERS = (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x7e", b"\x00\x7c", b"\0\0\0\0\0\0\xf8\x7f")  # NaN, inf

# of members of archives
NAMES = (
    "../outside.png",
    "/tmp/outside.png",
    "a/../../outside.png",
    "..\\outside.png",
    "C:outside.png",
    "cat/a\nb.png",
)
NAMES += (
    "cat/\u202egnp.exe",
    "cat/" + "x" * 300 + ".png",
    "cat/\0.png",
    ".png",
    "cat/",
    "",
    "cat/a.png/b.png",
    "~/a.png",
)


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


def flip_bytes(data: bytes, random: Random) -> bytes:
    start, end = span(data, random, 8)
    return data[:start] + random.randbytes(end - start) + data[end:]


def truncate(data: bytes, random: Random) -> bytes:
    return data[: span(data, random)[0]]


def behead(data: bytes, random: Random) -> bytes:
    return data[span(data, random)[1] :]


def insert(data: bytes, random: Random) -> bytes:
    start, end = span(data, random, 64)
    return data[:start] + random.randbytes(end - start) + data[start:]


def remove(data: bytes, random: Random) -> bytes:
    start, end = span(data, random)
    return data[:start] + data[end:]


def swap_blocks(data: bytes, random: Random) -> bytes:
    (a, b), (c, d) = sorted((span(data, random), span(data, random)))
    return data if c < b else data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def duplicate_block(data: bytes, random: Random) -> bytes:
    start, end = span(data, random)
    return data[:end] + data[start:end] + data[end:]


def zero_run(data: bytes, random: Random) -> bytes:
    start, end = span(data, random)
    return data[:start] + bytes(end - start) + data[end:]


def ones_run(data: bytes, random: Random) -> bytes:
    start, end = span(data, random)
    return data[:start] + b"\xff" * (end - start) + data[end:]


def huge_number(data: bytes, random: Random) -> bytes:
    """Write a huge integer of four or eight bytes anywhere, such as over a length."""
    start, _ = span(data, random, 1)
    form = random.choice(("<I", ">I", "<Q", ">Q"))
    number = random.choice(HUGE) & (2 ** (8 * struct.calcsize(form)) - 1)
    return data[:start] + struct.pack(form, number) + data[start + struct.calcsize(form) :]


def not_a_number(data: bytes, random: Random) -> bytes:
    """Write a NaN or an infinity of some dtype at a multiple of eight."""
    start, value = span(data, random, 1)[0] & ~7, random.choice(NUMBERS)
    return data[:start] + value + data[start + len(value) :]


def append(data: bytes, random: Random) -> bytes:
    return data + random.randbytes(random.choice((1, 100, 70_000)))


def twice(data: bytes, random: Random) -> bytes:
    return data + data


def empty(data: bytes, random: Random) -> bytes:
    return b""


def several(data: bytes, random: Random) -> bytes:
    for _ in range(3):
        data = random.choice((flip_bit, flip_bytes, zero_run, insert, remove, huge_number))(data or b"\0", random)
    return data


BYTES: tuple[Mutation, ...] = (flip_bit, flip_bit, flip_bit, flip_bytes, truncate, behead, insert, remove, swap_blocks)
BYTES += (duplicate_block, zero_run, ones_run, huge_number, huge_number, not_a_number, append, twice, empty, several)


# ---- what lies under the name of a file


def missing(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    """Extend the file to a terabyte without taking space on the disk."""
    os.truncate(path, 2**40)


PLACES: tuple[Callable[[Path], None], ...] = (missing, folder, pipe, loop, nowhere, endless, sparse)
