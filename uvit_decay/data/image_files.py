"""Images of a folder, zip or tar: list them with their classes, decode and crop them, read them into a tensor.

The class of an image is the name of its folder; images at the top level have no class. All values are uint8; data
modules convert them to float. EXIF orientation and colour profiles are ignored, as in the ADM pipeline, which defines
the crop and the usual reference statistics for FID.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

from uvit_decay.data.archives import find
from uvit_decay.data.members import DAMAGED, Found, opened
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.files import at_home

# Formats that PIL may open, whatever the file extension: common ones first, TGA last because it has no signature. The
# others are not images (labels.h5) or run another program on the contents (EPS, and IPTC, which may contain an EPS).
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
FORMATS += ("ICO", "PCX", "QOI", "SGI", "SUN", "XBM", "TGA")
MOST_PIXELS = 89_478_485  # PIL's limit, here for images before and after scaling

_DAMAGED = (*DAMAGED, Image.DecompressionBombError)


@dataclass(frozen=True)
class Listing:
    """Places and labels of images. It holds no open file, so it can be pickled and sent to worker processes.

    `members` are sorted names relative to `path`, '/' between folders; `labels[i]` indexes `class_names` (sorted).
    Without class folders `class_names` is empty and all labels are 0. `tars` and `spans` are those of `members.Found`.
    """

    path: Path
    members: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    tars: tuple[str, ...] = ()
    spans: np.ndarray | None = field(default=None, compare=False, repr=False)

    def opened(self) -> AbstractContextManager[Callable[[int], BytesIO]]:
        """Open the files; see `members.opened`."""
        return opened(self.path, Found(self.members, self.tars, self.spans))


def list_images(path: str | Path, classes: Collection[str] | None = None) -> Listing:
    """List all images in a folder (links are followed), zip or tar, or those of `classes`, without decoding any.

    A folder or tar may hold class folders or, as ImageNet does, one tar per class. Each of `classes` must have images.
    """
    path = at_home(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder, zip or tar")
    kinds = {*_formats(), "MPO"}  # PIL's name for a JPEG followed by another one
    extensions = {end for end, kind in Image.registered_extensions().items() if kind in kinds}
    names, tars, spans = find(path, extensions, classes)
    if not names:
        sought = "files ending in .png, .jpg, .jpeg, .webp or another extension of images, in any folder"
        raise UserError(f"{path}: no images in it; looked for {sought}, hidden files left out")
    folders = [name.rpartition("/")[0] for name in names]
    class_of = {folder: PurePosixPath(folder).name for folder in set(folders)}
    class_names = tuple(sorted(set(class_of.values()) - {""}))
    if class_names:
        _check_folders(path, {str(PurePosixPath(folder)) for folder in class_of})
    label_of = {folder: class_names.index(name) if class_names else 0 for folder, name in class_of.items()}
    listing = Listing(path, names, tuple(label_of[folder] for folder in folders), class_names, tars, spans)
    return listing if classes is None else select(listing, classes)


def select(listing: Listing, classes: Collection[str]) -> Listing:
    """Return the images of these classes only, labelled by the rank of their class among them, sorted."""
    class_names = tuple(sorted(classes))
    missing = sorted(set(class_names) - set(listing.class_names))
    if missing:
        count = f"no images of {len(missing)} of the {len(class_names)} classes asked for"
        raise UserError(f"{listing.path}: {count}, the first is {missing[0]}; each must be a folder of that name")
    rank = {name: label for label, name in enumerate(class_names)}
    labels = [rank.get(listing.class_names[label]) for label in listing.labels]
    kept = [i for i, label in enumerate(labels) if label is not None]
    return replace(
        listing,
        members=tuple(listing.members[i] for i in kept),
        labels=tuple(labels[i] for i in kept),
        class_names=class_names,
        spans=None if listing.spans is None else listing.spans[kept],
    )


def _check_folders(path: Path, folders: set[str]) -> None:
    """Raise a UserError if a folder with images lies inside another one, or if two have the same name."""
    seen: dict[str, str] = {}
    for folder in sorted(folders):
        outer = {str(parent) for parent in PurePosixPath(folder).parents}.intersection(folders)
        if outer:
            above = "at the top" if outer == {"."} else f"in {max(outer, key=len)}"
            hint = "put every image into a class folder, or none"
            raise UserError(f"{path}: images both {above} and in {folder} below it, so classes are unclear; {hint}")
        name = PurePosixPath(folder).name
        if name in seen:
            hint = f"point at one of them, such as the tree that has {folder}"
            raise UserError(f"{path}: two folders for one class name, {seen[name]} and {folder}; {hint}")
        seen[name] = folder


def size_of(listing: Listing) -> int:
    """Return the width and height of the first image; raise a UserError if it is not square or not readable."""
    name = listing.members[0]
    with listing.opened() as fetch, open_image(fetch(0), name) as image:
        width, height = image.size
    if width != height:
        raise UserError(f"{listing.path}: {name} is {width}x{height}, not square: --image-size N crops all to NxN")
    return width


@contextmanager
def open_image(file: BinaryIO, name: str) -> Iterator[Image.Image]:
    """Open an image of one of FORMATS without decoding it; the body of the `with` statement may decode it.

    Raises:
        UserError: the image is damaged, also if the body finds that, or has more than MOST_PIXELS pixels. The message
            starts with `name`.
    """
    with explained(name, *_DAMAGED):
        try:
            with Image.open(file, formats=_formats()) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{image.width}x{image.height}, more than {MOST_PIXELS:,} pixels")
                yield image
        except UnidentifiedImageError:  # PIL's message would show the address of a BytesIO
            raise UserError(f"{name}: not an image that PIL knows (empty, cut short or another kind of file)") from None


def decode(file: BinaryIO, name: str, size: int, channels: int, exact: bool = False) -> np.ndarray:
    """Decode an image to uint8 (channels, size, size), cropped by `centre_crop`; 1 channel is grey, 3 are RGB.

    With `exact`, nothing is cropped and the image must have that size. All FORMATS and PIL modes are supported:
    animations give their first frame, transparency is put on white, 16-bit grey and mode I have the range 0..65535,
    float images 0..1. (PIL itself reduces 16-bit colour to the high bytes.)

    Raises:
        UserError: the bytes cannot be decoded, values are outside these ranges, or the size differs with `exact` or
            cannot be scaled to `size`. The message starts with `name`.
    """
    _check_shape(size, channels)
    with open_image(file, name) as image:
        width, height = image.size
        if exact and (width, height) != (size, size):
            raise UserError(f"{name}: {width}x{height}, not {size}x{size}: --image-size N crops all to one size")
        if size**2 * max(image.size) > MOST_PIXELS * min(image.size):
            raise UserError(f"{name}: {width}x{height} is too long to be scaled to {size} on its shorter side")
        image.load()
        converted = _eight_bits(image, "L" if channels == 1 else "RGB")
    pixels = np.asarray(centre_crop(converted, size))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _eight_bits(image: Image.Image, mode: str) -> Image.Image:
    """Convert to `mode` ("L" or "RGB"); raise a ValueError for grey values outside the ranges of `decode`."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        top = 1.0 if image.mode == "F" else 65535
        if not ((values >= 0) & (values <= top)).all():  # NaN too; no clipping, which turns floats 0..255 white
            raise ValueError(f"values {values.min()} to {values.max()} in mode {image.mode}, expected 0 to {top}")
        grey = np.rint(values * (255 / top)).astype(np.uint8)
        if "transparency" in image.info:  # PNG: the one grey value that is transparent
            grey[values == image.info["transparency"]] = 255
        return Image.fromarray(grey).convert(mode)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Scale the shorter side to `size` and crop the centre to size x size: `center_crop_arr` of ADM (guided-diffusion).

    Box-filtered halvings come first, so that the bicubic filter always shrinks by less than 2. An image of size x size
    is returned unchanged.
    """
    if image.size == (size, size):
        return image
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    x, y = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((x, y, x + size, y + size))


def read(
    listing: Listing,
    size: int,
    channels: int,
    indices: Sequence[int] | None = None,
    progress: bool | None = None,
    exact: bool = False,
) -> Tensor:
    """Read all images, or those at `indices` in that order, as uint8 (n, channels, size, size), decoded in threads.

    Works in forked and spawned workers. With `progress` None, a bar is shown for more than 2000 images; `exact` is that
    of `decode`.

    Raises:
        UserError: images cannot be read; after trying all, the message counts them and explains the first failure.
    """
    _check_shape(size, channels)
    _formats()  # loaded before the threads start, which would race
    chosen = range(len(listing.members)) if indices is None else indices
    out = torch.empty(len(chosen), channels, size, size, dtype=torch.uint8)
    pixels = out.numpy()
    with listing.opened() as fetch:

        def fill(rows: range) -> list[str]:
            """Decode into these rows of `out` and return the error messages."""
            failures = []
            for row in rows:
                try:
                    pixels[row] = decode(fetch(chosen[row]), listing.members[chosen[row]], size, channels, exact)
                except UserError as error:
                    failures.append(str(error))
            return failures

        failures = _in_threads(fill, len(chosen), len(chosen) > 2000 if progress is None else progress)
    if failures:
        count = f"{len(failures)} of {len(chosen)} images cannot be read"
        raise UserError(f"{listing.path}: {count}; the first is {failures[0]}")
    return out


def _in_threads(fill: Callable[[range], list[str]], count: int, progress: bool) -> list[str]:
    """Call `fill` in threads on consecutive parts of range(count) and return the messages in order."""
    threads = min(16, os.cpu_count() or 1)
    step = min(64, 1 + count // (4 * threads))  # one future per image would cost gigabytes on ImageNet
    chunks = [range(count)[start : start + step] for start in range(0, count, step)]
    failures: list[str] = []
    pool = ThreadPoolExecutor(threads)
    with tqdm(total=count, desc="reading images", disable=not progress) as bar:
        try:
            for chunk, failed in zip(chunks, pool.map(fill, chunks), strict=True):
                failures += failed
                bar.update(len(chunk))
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the remaining images
    return failures


@cache
def _formats() -> list[str]:
    """Load PIL's plugins, common ones first (a third faster on CIFAR-10), and return the available FORMATS."""
    Image.preinit()
    Image.init()
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such images are refused
    return [name for name in FORMATS if name in Image.OPEN]


def _check_shape(size: int, channels: int) -> None:
    if channels not in (1, 3):
        raise UserError(f"images have 1 channel (grey) or 3 (RGB), not {channels}")
    if not 1 <= size <= math.isqrt(MOST_PIXELS):
        raise UserError(f"the size of images must lie between 1 and {math.isqrt(MOST_PIXELS)}, not {size}")
