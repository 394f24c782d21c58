"""Mutations of PNGs and JPEGs that know their chunks and segments."""

from __future__ import annotations

import functools
import struct
import zlib
from random import Random

from bytewise import Mutation


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    place, chunks = 8, []
    while place < len(data):
        size = struct.unpack_from(">I", data, place)[0]
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + size]))
        place += 12 + size
    return chunks


def _png(chunks: list[tuple[bytes, bytes]]) -> bytes:
    parts = (struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_is_whole(data: bytes) -> bool:
    """Return whether these are the chunks of a PNG, each with the right checksum."""
    try:
        return data.startswith(_png(_chunks(data[: data.index(b"IEND") + 8])))
    except (ValueError, struct.error):
        return False


@functools.cache
def _bomb() -> bytes:
    """Return 64 MB of zeros in 64 KB."""
    return zlib.compress(bytes(2**26))


def png_chunk(data: bytes, random: Random) -> bytes:
    """Leave out, repeat, swap, change or add a chunk; all checksums are right."""
    chunks = _chunks(data)
    i, j = random.randrange(len(chunks)), random.randrange(len(chunks))
    packed = _bomb()
    extra = (
        (b"zTXt", b"a\0\0" + packed),
        (b"iTXt", b"a\0\1\0\0\0" + packed),
        (b"iCCP", b"a\0\0" + packed),
        (b"acTL", struct.pack(">II", 2**31 - 1, 0)),
        (b"fcTL", struct.pack(">IIIIIHHBB", 0, 2**31, 2**31, 0, 0, 0, 0, 0, 0)),
        (b"tRNS", random.randbytes(7)),
        (b"PLTE", random.randbytes(7)),
        (b"gAMA", b""),
        (b"eXIf", random.randbytes(40)),
        (b"IDAT", packed),
        (b"QQQQ", b""),
    )
    change = random.randrange(5)
    if change == 0:
        chunks.pop(i)
    elif change == 1:
        chunks.insert(i, chunks[j])
    elif change == 2:
        chunks[i], chunks[j] = chunks[j], chunks[i]
    elif change == 3:
        kind, content = chunks[i]
        chunks[i] = kind, content[: random.randint(0, len(content))] + random.randbytes(random.randrange(9))
    else:
        chunks.insert(random.randint(1, len(chunks) - 1), random.choice(extra))
    return _png(chunks)


def png_header(data: bytes, random: Random) -> bytes:
    """State another size, depth or kind of pixels; the checksum is right."""
    chunks = _chunks(data)
    fields = list(struct.unpack(">IIBBBBB", chunks[0][1]))
    i = random.randrange(7)
    fields[i] = random.choice((0, 1, 9, 2**31 - 1, 2**16, 9459, fields[i] + 1)) if i < 2 else random.randrange(20)
    chunks[0] = b"IHDR", struct.pack(">IIBBBBB", *fields)
    return _png(chunks)


def png_pixels(data: bytes, random: Random) -> bytes:
    """Change the packed pixels; the checksum of the chunk is right, that of their own format is not."""
    chunks = _chunks(data)
    i = next(i for i, (kind, _) in enumerate(chunks) if kind == b"IDAT")
    content = bytearray(chunks[i][1])
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    chunks[i] = b"IDAT", bytes(content)
    return _png(chunks)


def _segments(data: bytes) -> list[int]:
    """Return the places of the marker segments of a JPEG up to its first scan."""
    place, places = 2, []
    while place + 4 <= len(data) and data[place] == 0xFF:
        places.append(place)
        if data[place + 1] == 0xDA:
            break
        place += 2 + struct.unpack_from(">H", data, place + 2)[0]
    return places


def jpeg_segment(data: bytes, random: Random) -> bytes:
    """Leave out, repeat or lengthen a segment, or state another size."""
    places = _segments(data)
    i = random.randrange(len(places) - 1)
    start, end = places[i], places[i + 1]
    frame = next((place for place in places if data[place + 1] in (0xC0, 0xC1, 0xC2)), places[0])
    size = struct.pack(">HH", *(random.choice((0, 1, 9459, 65535, 17)) for _ in range(2)))
    return random.choice(
        (
            data[:start] + data[end:],
            data[:end] + data[start:end] * random.choice((1, 50)) + data[end:],
            data[: start + 2] + struct.pack(">H", random.choice((0, 1, 2, 65535, end - start + 9))) + data[start + 4 :],
            data[: frame + 5] + size + data[frame + 9 :],
            data[: frame + 4] + bytes([random.randrange(20)]) + data[frame + 5 :],
            data[: frame + 9] + bytes([random.choice((0, 1, 4, 255))]) + data[frame + 10 :],
            data[:2] + b"\xff\xe1\xff\xffExif\0\0" + random.randbytes(500) + data[2:],
        )
    )


PNG: tuple[Mutation, ...] = (png_chunk, png_chunk, png_header, png_header, png_pixels)
JPEG: tuple[Mutation, ...] = (jpeg_segment,)
