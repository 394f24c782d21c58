"""List the images of a folder, zip or tar with their classes, and read them into a tensor.

`labels.py` finds their classes. All values are uint8; data modules convert them to float. `decoding.py` turns the bytes
of a file into pixels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from uvit_decay.data.archives import ArchiveIndex, file_states, find, open_members
from uvit_decay.data.decoding import Crop, centre_crop, check_shape, decode, formats, open_image
from uvit_decay.data.labels import SAMPLES, TABLES, LabelOptions, find_labels
from uvit_decay.runtime.concurrency import in_threads
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home, check_images_exist
from uvit_decay.runtime.progress import track

_PATIENCE = 3.0  # seconds after which a bar appears


@dataclass(frozen=True)
class Listing:
    """Places and labels of images. It holds no open file, so it can be pickled and sent to worker processes.

    Args:
        path: the folder, zip or tar.
        members: sorted names relative to `path`, '/' between folders.
        labels: indices into `class_names`; all 0 without classes.
        class_names: names of the classes; empty without classes.
        spans: places of the members of a tar, see `ArchiveIndex`.
        depth: number of folders around the images that do not identify them, see `Labels`.
        table: the table that the labels come from; empty for labels from folders.
    """

    path: Path
    members: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    spans: np.ndarray | None = field(default=None, compare=False, repr=False)
    depth: int | None = None
    table: str = ""

    def open(self) -> AbstractContextManager[Callable[[int], BytesIO]]:
        """Return a context with a function that reads image i; see `open_members`."""
        return open_members(self.path, self._index)

    @property
    def in_archive(self) -> bool:
        """True if the images are members of a zip or tar, so that their sizes are known without accessing each file."""
        return self.spans is not None or not self.path.is_dir()

    @property
    def stored_in(self) -> tuple[str, ...]:
        """The files that hold the images, relative to `path`: "" for an archive."""
        return self.members if self.path.is_dir() else ("",)

    def states(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the size in bytes of each image file at the indices `chosen`, in a zip also its CRC-32."""
        return file_states(self.path, self._index, chosen)

    @property
    def _index(self) -> ArchiveIndex:
        return ArchiveIndex(self.members, self.spans)


def list_images(
    path: str | Path,
    classes: Collection[str] | None = None,
    labels: LabelOptions = LabelOptions(),  # noqa: B008  frozen
) -> Listing:
    """List the images in a folder (links are followed), zip or tar, without decoding any.

    Archives inside it are not opened.

    Args:
        path: the folder, zip or tar.
        classes: list only images of these classes, which must all have images; None lists all images.
        labels: where the labels come from.

    Raises:
        UserError: there are no images or no images of a class, or the images have no labels, see `find_labels`.
    """
    path = at_home(path)
    check_images_exist(path)
    extensions = _extensions()
    images, others = find(path, extensions | {*TABLES, *SAMPLES}).split(extensions)
    if not images.names:
        kinds = ".png, .jpg, .webp and others; hidden files do not count; unpack archives that are inside"
        raise UserError(f"{path}: no images in it, in any folder ({kinds})")
    found = find_labels(path, images, others, labels)
    listing = Listing(path, images.names, found.labels, found.class_names, images.spans, found.depth, found.table)
    if classes is None:
        return listing
    return select(listing, classes)


def _extensions() -> set[str]:
    """Return the file extensions of the image formats."""
    kinds = {*formats(), "MPO"}  # PIL's name for a JPEG followed by another one
    return {extension for extension, kind in Image.registered_extensions().items() if kind in kinds}


def select(listing: Listing, classes: Collection[str]) -> Listing:
    """Return the images of these classes only, labelled by the rank of their class among them, sorted."""
    class_names = tuple(sorted(classes))
    missing = sorted(set(class_names) - set(listing.class_names))
    if missing:
        count = f"{len(missing)} of the {len(class_names)} classes have no images"
        place = "in the table of labels" if listing.table else "a folder of this name"
        raise UserError(f"{listing.path}: {count}, the first is {missing[0]}; each class must be {place}")
    rank = {name: label for label, name in enumerate(class_names)}
    kept, labels = [], []
    for i, label in enumerate(listing.labels):
        name = listing.class_names[label]
        if name in rank:
            kept.append(i)
            labels.append(rank[name])
    members = tuple(listing.members[i] for i in kept)
    spans = listing.spans
    if spans is not None:
        spans = spans[kept]
    return replace(listing, members=members, labels=tuple(labels), class_names=class_names, spans=spans)


def size_of(listing: Listing) -> int:
    """Return the side of the first image, in pixels; raise a UserError if it is not square or cannot be read."""
    name = listing.members[0]
    with listing.open() as fetch, open_image(fetch(0), name) as image:
        width, height = image.size
    if width != height:
        raise UserError(f"{listing.path}: {name} is {width}x{height}, not square; to crop all, add --image-size N")
    return width


def common_side(listing: Listing, indices: Sequence[int], most: int) -> int | None:
    """Return the side of these images if all are squares of one size, at most `most` pixels wide, otherwise None.

    Only headers are read, up to the first image that does not fit.
    """
    side = None
    with listing.open() as fetch:
        for i in indices:
            with open_image(fetch(i), listing.members[i]) as image:
                width, height = image.size
            side = side or width
            if not width == height == side <= most:
                return None
    return side


def read(
    listing: Listing,
    size: int,
    channels: int,
    indices: Sequence[int] | None = None,
    exact: bool = False,
    crop: Crop = centre_crop,
) -> Tensor:
    """Read images as uint8 (n, channels, size, size), decoded in threads.

    It works in forked and spawned workers, and shows a progress bar for more than 2000 images.

    Args:
        listing: the images.
        size: height and width of the result.
        channels: 1 for grey, 3 for RGB.
        indices: numbers of the images to read, in this order; None reads all.
        exact: see `decode`.
        crop: see `decode`.

    Raises:
        UserError: images cannot be read; all are tried, then the message counts them and explains the first failure.
    """
    check_shape(size, channels)
    formats()  # loads the plugins before the threads start, which would race
    chosen = range(len(listing.members)) if indices is None else indices
    out = torch.empty(len(chosen), channels, size, size, dtype=torch.uint8)
    pixels = out.numpy()
    with listing.open() as fetch:

        def fill(row: int) -> str | None:
            """Decode into this row of `out`; return the message of an error."""
            i = chosen[row]
            try:
                pixels[row] = decode(fetch(i), listing.members[i], size, channels, exact, crop)
            except UserError as error:
                return str(error)
            return None

        threads = min(16, os.cpu_count() or 1)
        failures = []
        with track("reading images", len(chosen), "image", delay=_PATIENCE) as work:
            for failure in in_threads(fill, range(len(chosen)), threads):
                work.update()
                if failure is not None:
                    failures.append(failure)
    if failures:
        count = f"{len(failures)} of {len(chosen)} images cannot be read"
        raise UserError(f"{listing.path}: {count}; the first is {failures[0]}")
    return out
