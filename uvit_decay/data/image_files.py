"""Images of a folder, zip or tar: list them with their classes, and read them into a tensor.

The class of an image is the name of its folder; images at the top level have no class. All values are uint8; data
modules convert them to float. `decoding.py` turns the bytes of a file into pixels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from uvit_decay.class_names import class_hash
from uvit_decay.data.archives import ArchiveIndex, file_states, find, opened
from uvit_decay.data.decoding import Crop, centre_crop, check_shape, decode, formats, open_image
from uvit_decay.runtime.concurrency import in_threads
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home


@dataclass(frozen=True)
class Listing:
    """Places and labels of images. It holds no open file, so it can be pickled and sent to worker processes.

    `members` are sorted names relative to `path`, '/' between folders; `labels[i]` indexes `class_names` (sorted).
    Without class folders `class_names` is empty and all labels are 0. `spans`: see `ArchiveIndex`.
    """

    path: Path
    members: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    spans: np.ndarray | None = field(default=None, compare=False, repr=False)

    def opened(self) -> AbstractContextManager[Callable[[int], BytesIO]]:
        """Open the files; see `archives.opened`."""
        return opened(self.path, self._index)

    @property
    def in_archive(self) -> bool:
        """Whether the images are members of a zip or tar, whose sizes are known without touching each file."""
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


def list_images(path: str | Path, classes: Collection[str] | None = None) -> Listing:
    """List all images in a folder (links are followed), zip or tar, or those of `classes`, without decoding any.

    Archives inside of it are not opened. Each of `classes` must have images.
    """
    path = at_home(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder, zip or tar")
    kinds = {*formats(), "MPO"}  # PIL's name for a JPEG followed by another one
    extensions = {end for end, kind in Image.registered_extensions().items() if kind in kinds}
    names, spans = find(path, extensions)
    if not names:
        kinds = ".png, .jpg, .webp and others; no hidden files; archives inside are not opened, unpack them"
        raise UserError(f"{path}: no images in it, in any folder ({kinds})")
    folders = [name.rpartition("/")[0] for name in names]
    class_of = {folder: PurePosixPath(folder).name for folder in set(folders)}
    class_names = tuple(sorted(set(class_of.values()) - {""}))
    class_hash(class_names)  # refuses names that cannot be shown
    if class_names:
        _check_folders(path, {str(PurePosixPath(folder)) for folder in class_of})
    label_of = {folder: class_names.index(name) if class_names else 0 for folder, name in class_of.items()}
    listing = Listing(path, names, tuple(label_of[folder] for folder in folders), class_names, spans)
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
            raise UserError(f"{path}: images both {above} and in {folder} below it: put all into class folders or none")
        name = PurePosixPath(folder).name
        if name in seen:
            raise UserError(f"{path}: two folders for one class, {seen[name]} and {folder}; point at one of the trees")
        seen[name] = folder


def size_of(listing: Listing) -> int:
    """Return the width and height of the first image; raise a UserError if it is not square or not readable."""
    name = listing.members[0]
    with listing.opened() as fetch, open_image(fetch(0), name) as image:
        width, height = image.size
    if width != height:
        raise UserError(f"{listing.path}: {name} is {width}x{height}, not square: --image-size N crops all to NxN")
    return width


def common_side(listing: Listing, indices: Sequence[int], most: int) -> int | None:
    """Return the side of these images if all are squares of one size, at most `most` pixels wide, else None.

    Only headers are read, up to the first image that differs.
    """
    side = None
    with listing.opened() as fetch:
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
    """Read all images, or those at `indices` in that order, as uint8 (n, channels, size, size), decoded in threads.

    Works in forked and spawned workers. A bar is shown for more than 2000 images; `exact` and `crop` are those of
    `decode`.

    Raises:
        UserError: images cannot be read; after trying all, the message counts them and explains the first failure.
    """
    check_shape(size, channels)
    formats()  # loaded before the threads start, which would race
    chosen = range(len(listing.members)) if indices is None else indices
    out = torch.empty(len(chosen), channels, size, size, dtype=torch.uint8)
    pixels = out.numpy()
    with listing.opened() as fetch:

        def fill(row: int) -> str | None:
            """Decode into this row of `out`; return the message of an error."""
            i = chosen[row]
            try:
                pixels[row] = decode(fetch(i), listing.members[i], size, channels, exact, crop)
            except UserError as error:
                return str(error)
            return None

        results = in_threads(fill, range(len(chosen)), min(16, os.cpu_count() or 1))
        shown = tqdm(results, "reading images", len(chosen), disable=len(chosen) <= 2000)
        failures = [failure for failure in shown if failure is not None]
    if failures:
        count = f"{len(failures)} of {len(chosen)} images cannot be read"
        raise UserError(f"{listing.path}: {count}; the first is {failures[0]}")
    return out
