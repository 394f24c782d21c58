"""Conversion of images between uint8 and float, grids, PNG and npz files.

Networks take float images in [-1, 1]; on disk and in metrics images are uint8. Batches are (n, c, h, w).
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from uvit_decay.files.writing import replacing
from uvit_decay.runtime.concurrency import in_threads
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Positive, check_types

PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
HEADING = 22  # pixels of the headings of a grid
FONT = 11  # size of their font, in pixels
GAP = 4  # pixels between images of a grid
ELLIPSIS = "..."


@check_types
def to_float(images: UInt8[Tensor, "*shape"]) -> Tensor:
    """Convert uint8 in [0, 255] to float32 in [-1, 1]."""
    return images.float() / 127.5 - 1.0


@check_types
def to_uint8(images: Float[Tensor, "*shape"]) -> Tensor:
    """Convert float, about [-1, 1], to uint8, clamped and rounded.

    Raises:
        UserError: a value is NaN, which would become black, or infinite.
    """
    if not images.isfinite().all():
        raise UserError(
            "the images contain NaN or infinite values: use more steps, less guidance or another checkpoint"
        )
    levels = (images.float() + 1.0) * 127.5
    return levels.clamp(0, 255).round().to(torch.uint8)


def to_grey(images: Tensor) -> Tensor:
    """Convert RGB images, uint8 (n, 3, h, w), to grey ones, uint8 (n, 1, h, w), by the weights of ITU-R 601.

    The values are PIL's: fixed-point numbers of 16 bits, rounded.
    """
    red, green, blue = images.to(torch.int32).split(1, dim=1)
    return ((19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16).to(torch.uint8)


def to_pil(image: Tensor) -> Image.Image:
    """Convert a uint8 image (c, h, w) to a PIL image; c = 1 is grey, c = 3 is RGB."""
    pixels = image.cpu().numpy()
    if len(pixels) == 1:
        return Image.fromarray(pixels[0])
    return Image.fromarray(pixels.transpose(1, 2, 0))


@check_types
def labelled_grid(
    images: UInt8[Tensor, "n c h w"], columns: Positive, names: Sequence[str] = (), cell: Positive = 64
) -> Image.Image:
    """Return a grid of uint8 images (n, c, h, w), filled row by row.

    Args:
        images: the images, all of one size and square.
        columns: number of columns.
        names: headings of the columns; the end of a name that is wider than its images becomes "...".
        cell: images smaller than this, in pixels, are enlarged by a whole factor, up to this size.
    """
    width = images.shape[-1]
    side = width * max(1, cell // width)
    step = side + GAP
    header = HEADING if names else 0
    rows = -(-len(images) // columns)
    canvas = Image.new("RGB", (columns * step + GAP, header + rows * step + GAP), "white")
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        tile = to_pil(image).resize((side, side), Image.Resampling.NEAREST)
        canvas.paste(tile, (GAP + column * step, header + GAP + row * step))
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=FONT)
    for column, name in enumerate(names[:columns]):
        middle = GAP + column * step + side // 2
        draw.text((middle, 18), _shorten_line(name, side, font), fill="black", font=font, anchor="ms")
    return canvas


def _shorten_line(line: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """Return a line that fits, with "..." instead of what does not."""
    if font.getlength(line) <= width:
        return line
    line = line[:width]  # a letter is at least a pixel wide
    while line and font.getlength(line + ELLIPSIS) > width:
        line = line[:-1]
    return line + ELLIPSIS


def grid_columns(classes: int, about: int = 10) -> int:
    """Return a number of columns, close to `about`, such that images of `classes` in turn have one class per column.

    `classes` is 0 for images without classes.
    """
    if not classes:
        return about
    return classes * max(1, about // classes)


@check_types
def save_npz(
    path: Path, batches: Iterable[Tensor], count: Positive, labels: Sequence[int] | Tensor | None = None
) -> None:
    """Write images as ADM's evaluation suite does: `arr_0`, uint8 (n, h, w, c), and with labels `arr_1`, int64 (n).

    Only one batch is in memory at a time. The file replaces `path` when it is complete.

    Args:
        path: the .npz file.
        batches: uint8 images (b, c, h, w).
        count: number of images in all batches.
        labels: class of each image.
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
                pixels = batch.permute(0, 2, 3, 1).contiguous()
                entry.write(pixels.cpu().numpy())
                written += len(batch)
        if written != count:
            raise ValueError(f"{written} images instead of {count}")
        if labels is not None:
            with archive.open("arr_1.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(labels, dtype=np.int64))


@check_types
def save_image(path: Path, image: Image.Image) -> None:
    """Write a PNG atomically; see `replacing`."""
    with replacing(path) as file:
        image.save(file, "PNG")


def is_png(path: Path) -> bool:
    """Return whether a path is a regular file with the last bytes of a PNG."""
    if path.is_symlink() or not path.is_file():
        return False
    start = max(0, path.stat().st_size - len(PNG_END))
    with path.open("rb") as file:
        file.seek(start)
        return file.read() == PNG_END


def png_name(number: int) -> str:
    """Return the file name of an image: 000000.png, 000001.png, ..."""
    return f"{number:06d}.png"


@check_types
def save_pngs(folder: Path, batches: Iterable[Tensor], numbers: Iterable[int] | None = None) -> None:
    """Write one PNG per image of uint8 batches (b, c, h, w), each atomically, named by `numbers` (default: 0, 1, ...).

    A thread writes a batch while the next one is computed: compressing a PNG of 256x256 takes about 16 ms.
    """

    def write(part: list[tuple[int, Tensor]]) -> None:
        for number, image in part:
            save_image(folder / png_name(number), to_pil(image))

    if numbers is None:
        numbers = itertools.count()
    for _ in in_threads(write, _number_images(batches, numbers), 1):
        pass


def _number_images(batches: Iterable[Tensor], numbers: Iterable[int]) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield each batch as pairs of a number and an image."""
    remaining = iter(numbers)
    for batch in batches:
        batch_numbers = itertools.islice(remaining, len(batch))
        yield list(zip(batch_numbers, batch, strict=False))
