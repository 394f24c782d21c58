"""Mutations of zips, also .npz and files of torch.save, that know where their fields are."""

from __future__ import annotations

import io
import struct
import zipfile
from random import Random

from bytewise import NAMES, Mutation
from documents import evil_pickle

CENTRAL = {"version": (6, "H"), "flags": (8, "H"), "method": (10, "H"), "crc": (16, "I"), "packed": (20, "I")}
CENTRAL |= {"size": (24, "I"), "name": (28, "H"), "extra": (30, "H"), "comment": (32, "H"), "disk": (34, "H")}
CENTRAL |= {"attributes": (38, "I"), "offset": (42, "I"), "letter": (46, "B")}
LOCAL = {"version": (4, "H"), "flags": (6, "H"), "method": (8, "H"), "crc": (14, "I"), "packed": (18, "I")}
LOCAL |= {"size": (22, "I"), "name": (26, "H"), "extra": (28, "H"), "letter": (30, "B")}
END = {
    "disk": (4, "H"),
    "start": (6, "H"),
    "here": (8, "H"),
    "count": (10, "H"),
    "size": (12, "I"),
    "offset": (16, "I"),
}


def _set(data: bytes, place: int, form: str, random: Random) -> bytes:
    old = struct.unpack_from(f"<{form}", data, place)[0]
    most = 2 ** (8 * struct.calcsize(form)) - 1
    new = (
        random.choice((0, 1, most, old ^ (1 << random.randrange(8)), old + 1, most // 2, random.randint(0, most)))
        & most
    )
    return data[:place] + struct.pack(f"<{form}", new) + data[place + struct.calcsize(form) :]


def _directory(data: bytes) -> tuple[list[int], int]:
    """Return the places of the entries of a zip's central directory, and of its end record."""
    end = data.rindex(b"PK\5\6")
    count, _, place = struct.unpack_from("<HII", data, end + 10)
    places = []
    for _ in range(count):
        places.append(place)
        place += 46 + sum(struct.unpack_from("<HHH", data, place + 28))
    return places, end


def _offset(data: bytes, entry: int) -> int:
    return struct.unpack_from("<I", data, entry + 42)[0]


def zip_entry(data: bytes, random: Random) -> bytes:
    """Change a field of an entry in the central directory, in the member's own header, or in both."""
    place = random.choice(_directory(data)[0])
    where = random.randrange(3)
    name = random.choice([field for field in LOCAL if where < 2 or field != "letter"])  # not renamed in both
    if where == 0:
        field, form = CENTRAL[random.choice(list(CENTRAL))]
        return _set(data, place + field, form, random)
    local = _offset(data, place)
    changed = _set(data, local + LOCAL[name][0], LOCAL[name][1], random)
    if where == 2:
        form = LOCAL[name][1]
        value = changed[local + LOCAL[name][0] :][: struct.calcsize(form)]
        target = place + CENTRAL[name][0]
        changed = changed[:target] + value + changed[target + len(value) :]
    return changed


def zip_end(data: bytes, random: Random) -> bytes:
    _, end = _directory(data)
    field, form = random.choice(list(END.values()))
    return _set(data, end + field, form, random)


def zip_swap(data: bytes, random: Random) -> bytes:
    """Swap the places, the checksums or the names of two members in the central directory."""
    places, _ = _directory(data)
    first, second = random.sample(places, 2) if len(places) > 1 else places * 2
    length = struct.unpack_from("<H", data, first + 28)[0]
    same = struct.unpack_from("<H", data, second + 28)[0] == length
    field, size = random.choice(((42, 4), (42, 4), (16, 4), *(((46, length),) if same else ())))
    out = bytearray(data)
    out[first + field : first + field + size] = data[second + field : second + field + size]
    out[second + field : second + field + size] = data[first + field : first + field + size]
    return bytes(out)


def zip_drop(data: bytes, random: Random) -> bytes:
    """Take an entry out of the central directory, or put one there twice; counts and sizes are right again."""
    places, end = _directory(data)
    bounds = [*places, end if b"PK\6\6" not in data else data.rindex(b"PK\6\6")]
    i = random.randrange(len(places))
    entry, copies = data[bounds[i] : bounds[i + 1]], random.choice((0, 0, 2))
    tail = bytearray(data[bounds[-1] :])
    at = end - bounds[-1] + 8
    struct.pack_into(
        "<HHI", tail, at, *(len(places) + copies - 1,) * 2, bounds[-1] - bounds[0] + (copies - 1) * len(entry)
    )
    return data[: bounds[i]] + entry * copies + data[bounds[i + 1] : bounds[-1]] + bytes(tail)


def zip_without_checksums(data: bytes, random: Random) -> bytes:
    out = bytearray(data)
    for place in _directory(data)[0]:
        out[place + 16 : place + 20] = bytes(4)
    return bytes(out)


def zip_prefixed(data: bytes, random: Random) -> bytes:
    return random.choice((b"#!/bin/sh\ntouch canary\n", b"\0" * 64, data[:100])) + data


def zip_comment(data: bytes, random: Random) -> bytes:
    """Add a comment, which may hold a second end of the directory."""
    _, end = _directory(data)
    comment = random.choice((b"x" * 20, data[end : end + 22]))
    return data[: end + 20] + struct.pack("<H", len(comment)) + comment


def _members(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def _zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members:
            entry = zipfile.ZipInfo(name or "x")
            entry.compress_type = method
            archive.writestr(entry, content)
    return file.getvalue()


def zip_hostile_name(data: bytes, random: Random) -> bytes:
    """Add a member whose name leads elsewhere, with the contents of another."""
    members = _members(data)
    members.insert(random.randint(0, len(members)), (random.choice(NAMES), random.choice(members)[1]))
    return _zipped(members)


def zip_packed(data: bytes, random: Random) -> bytes:
    """Add a member that unpacks to 64 MB, or compress all of them."""
    members = _members(data)
    if random.random() < 0.5:
        name = random.choice(members)[0]
        members.append((name.rpartition(".")[0] + "_." + name.rpartition(".")[2], bytes(2**26)))
    return _zipped(members, zipfile.ZIP_DEFLATED)


def zip_pickle(data: bytes, random: Random) -> bytes:
    """Let the pickle of a file of torch.save, or an array, run a program; all checksums are right."""
    members = _members(data)
    names = [name for name, _ in members]
    target = next((name for name in names if name.endswith("data.pkl")), names[0])
    return _zipped([(name, evil_pickle(content, random) if name == target else content) for name, content in members])


ZIP: tuple[Mutation, ...] = (zip_entry, zip_entry, zip_entry, zip_end, zip_swap, zip_swap, zip_drop, zip_prefixed)
ZIP += (zip_without_checksums, zip_comment, zip_hostile_name, zip_packed)
TORCH = (*ZIP, zip_pickle, zip_pickle)
