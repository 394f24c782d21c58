"""Mutations of tars and safetensors that know where their fields are."""

from __future__ import annotations

import io
import json
import tarfile
from random import Random
from typing import Any

from bytewise import HUGE, NAMES, Mutation
from documents import edited

TAR_FIELDS = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "kind": (156, 1), "link": (157, 100)}
TAR_FIELDS |= {"magic": (257, 6), "version": (263, 2), "prefix": (345, 155)}
TAR_VALUES = (
    b"../outside.png",
    b"/tmp/outside.png",
    b"cat/a.png",
    b"\xff" * 12,
    b"\x80" + b"\0" * 10 + b"\1",
    b"77777777777",
)
TAR_VALUES += (
    b"-1",
    b"0",
    b"1",
    b"2",
    b"3",
    b"5",
    b"6",
    b"L",
    b"K",
    b"x",
    b"g",
    b"S",
    b"V",
    b"\0",
    b"ustar ",
    b"99999",
    b"",
)


def _summed(block: bytes) -> bytes:
    """Return the header of a member with the right checksum."""
    total = sum(block[:148]) + 8 * 32 + sum(block[156:512])
    return block[:148] + f"{total:06o}\0 ".encode() + block[156:]


def tar_field(data: bytes, random: Random) -> bytes:
    """Change a field of a member's header; its checksum is right again."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        place = random.choice(archive.getmembers()).offset
    start, size = random.choice(list(TAR_FIELDS.values()))
    value = random.choice((*TAR_VALUES, random.randbytes(size)))[:size].ljust(size, b"\0")
    block = data[place : place + start] + value + data[place + start + size : place + 512]
    return data[:place] + _summed(block) + data[place + 512 :]


def tar_member(data: bytes, random: Random) -> bytes:
    """Put a hostile member first: a link, a device, a name that leads elsewhere, a name of a gigabyte."""
    entry = tarfile.TarInfo(random.choice(NAMES).replace("\0", "") or "x")
    entry.type = random.choice((b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"L", b"K", b"x", b"g", b"S", b"Z"))
    entry.linkname = random.choice(("/etc/passwd", "../../outside", "cat/a.png", entry.name))
    entry.size = random.choice((0, 0, 512, 2**30, 2**33 - 1))
    form = random.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    return entry.tobuf(form, errors="surrogateescape") + random.randbytes(512 * random.randrange(2)) + data


def tar_pax(data: bytes, random: Random) -> bytes:
    """Give the first member extended fields."""
    key = random.choice(
        ("path", "linkpath", "size", "hdrcharset", "GNU.sparse.map", "GNU.sparse.major", "mtime", "\u0661")
    )
    value = random.choice(("../outside.png", "-5", str(2**70), "9" * 5000, "BINARY", "0,1,2,x", "nan", "\ud800", ""))
    record = f" {key}={value}\n".encode(errors="surrogatepass")
    record = str(len(record) + random.choice((2, 3, 4, 10**9))).encode() + record
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = random.choice((b"x", b"g")), len(record)
    return entry.tobuf(tarfile.USTAR_FORMAT) + record.ljust(-(-len(record) // 512) * 512, b"\0") + data


TAR: tuple[Mutation, ...] = (tar_field, tar_field, tar_field, tar_member, tar_member, tar_pax)


# ---- safetensors


def _reheaded(header: Any, tensors: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def header_entry(data: bytes, random: Random) -> bytes:
    """Change dtype, shape, offsets or name of a tensor, swap two of them, or leave one out."""
    header, tensors = _split(data)
    names = [name for name in header if name != "__metadata__"]
    name, other = random.choice(names), random.choice(names)
    entry = header[name]
    most = random.choice(HUGE)
    begin, end = entry["data_offsets"]
    change = random.choice(
        (
            lambda: entry.update(
                dtype=random.choice(("F64", "F32", "I32", "BF16", "F16", "U8", "I8", "BOOL", "C64", "X"))
            ),
            lambda: entry.update(shape=entry["shape"][::-1]),
            lambda: entry.update(
                shape=random.choice(([], [0], [-1], [most], [most, most], ["a"], 7, None, [1] * 1000))
            ),
            lambda: entry.update(
                data_offsets=random.choice(([end, begin], [0, most], [begin, end - 1], [begin + 4, end + 4]))
            ),
            lambda: header.update({name: header[other], other: entry}),
            lambda: header.update({random.choice(NAMES): header.pop(name)}),
            lambda: header.pop(name),
            lambda: header.update({name: random.choice((None, [], 3, {}))}),
        )
    )
    change()
    return _reheaded(header, tensors)


def header_metadata(data: bytes, random: Random) -> bytes:
    """Change the metadata, drop one of them or all, or make them something else than texts."""
    header, tensors = _split(data)
    metadata = header.get("__metadata__", {"x": "y"})
    key = random.choice(list(metadata))
    change = random.choice(
        (
            lambda: metadata.pop(key),
            lambda: header.pop("__metadata__", None),
            lambda: metadata.update(
                {key: random.choice(("", "{}", "[" * 10**5, "null", "9" * 5000, "\0", 3, None, ["x"]))}
            ),
            lambda: metadata.update({key: edited(metadata[key].encode(), random).decode(errors="replace")}),
            lambda: header.update(__metadata__=random.choice(([], "x", 3, {"x": {}}))),
        )
    )
    change()
    return _reheaded(header, tensors)


def header_text(data: bytes, random: Random) -> bytes:
    """Nest without end, repeat a key, or state another length of the header."""
    header, tensors = _split(data)
    text = json.dumps(header)
    name = next(iter(header))
    return random.choice(
        (
            lambda: _reheaded(b"[" * 50_000, tensors),
            lambda: _reheaded(b'{"a":' * 50_000, tensors),
            lambda: _reheaded((text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode(), tensors),
            lambda: random.choice(HUGE).to_bytes(8, "little") + data[8:],
            lambda: (len(text) + random.choice((-8, -1, 1, 8))).to_bytes(8, "little") + data[8:],
            lambda: _reheaded(text.encode() + b" " * 7, tensors),
        )
    )()


SAFETENSORS: tuple[Mutation, ...] = (
    header_entry,
    header_entry,
    header_entry,
    header_metadata,
    header_metadata,
    header_text,
)
