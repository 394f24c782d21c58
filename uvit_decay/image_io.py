"""Conversion of images between uint8 and float, grids, PNG and npz files.

Networks take float images in [-1, 1]; on disk and in metrics images are uint8. Batches are (n, c, h, w).
"""

from __future__ import annotations

import itertools
import zipfile
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from uvit_decay.runtime.concurrency import in_threads
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import replacing

PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
LINE = 12  # pixels from a line of a heading to the next


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 in [0, 255] to float32 in [-1, 1]."""
    return images.float() / 127.5 - 1.0


def to_uint8(images: Tensor) -> Tensor:
    """Convert float, about [-1, 1], to uint8, clamped and rounded; raise a UserError at a NaN, which would be black."""
    if not images.isfinite().all():
        raise UserError("the images hold NaN or infinite values: take more steps, less guidance or another checkpoint")
    return ((images.float() + 1.0) * 127.5).clamp(0, 255).round().to(torch.uint8)


def to_pil(image: Tensor) -> Image.Image:
    """Return a PIL image of one uint8 image (c, h, w); c = 1 is grey, c = 3 is RGB."""
    pixels = image.cpu().numpy()
    return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))


def labelled_grid(images: Tensor, columns: int, names: Sequence[str] = (), cell: int = 64) -> Image.Image:
    """Return a grid of uint8 images (n, c, h, w), filled row by row.

    Args:
        images: the images, all of one size and square.
        columns: number of columns.
        names: headings of the columns, of one or two lines; they are shortened to fit.
        cell: images smaller than this, in pixels, are enlarged by a whole factor, up to this size.
    """
    scale = max(1, cell // images.shape[-1])
    side, gap = images.shape[-1] * scale, 4
    headings = [_heading(name, side) for name in names[:columns]]
    header = 22 + LINE * (max(len(lines) for lines, _ in headings) - 1) if headings else 0
    rows = -(-len(images) // columns)
    canvas = Image.new("RGB", (columns * (side + gap) + gap, header + rows * (side + gap) + gap), "white")
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        tile = to_pil(image).resize((side, side), Image.Resampling.NEAREST)
        canvas.paste(tile, (gap + column * (side + gap), header + gap + row * (side + gap)))
    draw = ImageDraw.Draw(canvas)
    for column, (lines, font) in enumerate(headings):
        for i, line in enumerate(lines):
            place = gap + column * (side + gap) + side // 2, 18 + LINE * i
            draw.text(place, line, fill="black", font=font, anchor="ms")
    return canvas


def _heading(name: str, width: int) -> tuple[list[str], ImageFont.FreeTypeFont]:
    """Return a name as one line, or two if it needs them and has words, in the largest font in which it fits.

    What does not fit in the smallest font that is legible is cut.
    """
    words = name.split()
    halves = [[" ".join(words[:i]), " ".join(words[i:])] for i in range(1, len(words))]
    forms = [[name], *([min(halves, key=lambda lines: max(map(len, lines)))] if halves else [])]
    for lines in forms:
        for size in range(14 if len(lines) == 1 else LINE - 1, 8, -1):
            font = ImageFont.load_default(size=size)
            if all(font.getlength(line) <= width for line in lines):
                return lines, font
    return [_cut(line, width, font) for line in lines], font


def _cut(line: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    line = line[:width]  # a letter is at least a pixel wide
    while font.getlength(line) > width:
        line = line[:-1]
    return line


def grid_columns(classes: int, about: int = 10) -> int:
    """Return the number of columns with which images that take `classes` labels in turn have one class per column."""
    return classes * max(1, about // classes) if classes else about


def save_npz(path: Path, batches: Iterable[Tensor], count: int, labels: Sequence[int] | None = None) -> None:
    """Write the layout of ADM's evaluation suite: `arr_0`, uint8 (n, h, w, c), and with labels `arr_1`, int64 (n).

    The `count` images of all `batches`, uint8 (b, c, h, w), are written batch by batch: only one is in memory. The file
    replaces `path` when it is complete.
    """
    batches = iter(batches)
    first = next(batches)
    channels, height, width = first.shape[1:]
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as entry:  # as np.savez does: it may exceed 4 GiB
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, height, width, channels)}
            np.lib.format.write_array_header_1_0(entry, header)
            written = 0
            for batch in itertools.chain([first], batches):
                entry.write(batch.permute(0, 2, 3, 1).contiguous().cpu().numpy())
                written += len(batch)
        if written != count:
            raise ValueError(f"{written} images instead of {count}")
        if labels is not None:
            with archive.open("arr_1.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(labels, dtype=np.int64))


def save_image(path: Path, image: Image.Image) -> None:
    """Write a PNG atomically; see `replacing`."""
    with replacing(path) as file:
        image.save(file, "PNG")


def is_png(path: Path) -> bool:
    """Return whether a path is a regular file that ends as a PNG does."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(PNG_END)))
        return file.read() == PNG_END


def png_name(number: int) -> str:
    """Return the file name of an image: 000000.png, 000001.png, ..."""
    return f"{number:06d}.png"


def save_pngs(folder: Path, batches: Iterable[Tensor], numbers: Iterable[int] | None = None) -> None:
    """Write one PNG per image of uint8 batches (b, c, h, w), each atomically, named by `numbers`, else 0, 1, ...

    A thread writes a batch while the next one is made: compressing a PNG of 256x256 takes about 16 ms.
    """
    numbers = iter(itertools.count() if numbers is None else numbers)

    def write(part: list[tuple[int, Tensor]]) -> None:
        for number, image in part:
            save_image(folder / png_name(number), to_pil(image))

    parts = (list(zip(itertools.islice(numbers, len(batch)), batch, strict=False)) for batch in batches)
    deque(in_threads(write, parts, 1), maxlen=0)
