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
from torch import Tensor

from uvit_decay.data.archives import ArchiveIndex, Kinds, file_states, find, open_members
from uvit_decay.data.decoding import (
    Decoding,
    Look,
    check_size,
    decode,
    formats,
    is_transparent,
    open_image,
)
from uvit_decay.data.file_kinds import count_kinds, count_others, hint_at_heif, list_extensions
from uvit_decay.data.labels import SAMPLES, TABLES, LabelOptions, find_labels
from uvit_decay.runtime.concurrency import in_threads
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home, check_images_exist
from uvit_decay.runtime.progress import track

LOSSY = (".jpg", ".jpeg")
_PATIENCE = 3.0  # seconds after which a bar appears
MOST_TRIED = 2000  # images of a set that are all tried, to count them, if one of a batch cannot be read
MOST_NAMED = 8  # images that cannot be read in a message

Failures = dict[int, str]  # index of an image that cannot be read, and why, in a line that begins with its name


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
        others: the number of the other visible files by extension.
        left_out: a line about each image that was listed and left out because it cannot be read.
    """

    path: Path
    members: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    spans: np.ndarray | None = field(default=None, compare=False, repr=False)
    others: Kinds = field(default=(), compare=False, repr=False)
    left_out: tuple[str, ...] = field(default=(), compare=False, repr=False)
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
    def has_jpegs(self) -> bool:
        """True if some images are JPEGs by their names."""
        return any(name.lower().endswith(LOSSY) for name in self.members)

    @property
    def stored_in(self) -> tuple[str, ...]:
        """The files that hold the images, relative to `path`: "" for an archive."""
        return self.members if self.path.is_dir() else ("",)

    def states(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the size in bytes of each image file at the indices `chosen`, in a zip also its CRC-32."""
        return file_states(self.path, self._index, chosen)

    def take(self, chosen: Sequence[int]) -> Listing:
        """Return the images at the indices `chosen`, with the same classes."""
        members = tuple(self.members[i] for i in chosen)
        labels = tuple(self.labels[i] for i in chosen)
        spans = self.spans
        if spans is not None:
            spans = spans[list(chosen)]
        return replace(self, members=members, labels=labels, spans=spans)

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
    extensions = list_extensions()
    images, beside = find(path, extensions | {*TABLES, *SAMPLES}).split(extensions)
    others = count_others(images.others, beside.names)
    if not images.names:
        kinds = ".png, .jpg, .webp and others; hidden files do not count; unpack archives that are inside"
        has = f"; it has {count_kinds(others)}{hint_at_heif(others)}" if others else ""
        raise UserError(f"{path}: no images in it that can be read, in any folder ({kinds}){has}")
    found = find_labels(path, images, beside, labels)
    unused = [name for name in beside.names if f"{path}/{name}" != found.table]
    listing = Listing(
        path,
        images.names,
        found.labels,
        found.class_names,
        images.spans,
        count_others(images.others, unused),
        depth=found.depth,
        table=found.table,
    )
    if classes is None:
        return listing
    return select(listing, classes)


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
    return replace(listing.take(kept), labels=tuple(labels), class_names=class_names)


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

    Only headers are read, up to the first image that does not fit. Images whose header cannot be read do not count:
    `read` names all of them.
    """
    side = None
    with listing.open() as fetch:
        for i in indices:
            try:
                with open_image(fetch(i), listing.members[i]) as image:
                    width, height = image.size
            except UserError:
                continue
            side = side or width
            if not width == height == side <= most:
                return None
    return side


def read(listing: Listing, decoding: Decoding, indices: Sequence[int] | None = None) -> Tensor:
    """Read images as uint8 (n, channels, size, size), decoded in threads.

    It works in forked and spawned workers, and shows a progress bar if it takes more than 3 seconds.

    Args:
        listing: the images.
        decoding: size, channels and crop of the result.
        indices: numbers of the images to read, in this order; None reads all.

    Raises:
        UserError: images cannot be read. The message counts them, and explains the first ones; of a listing of at most
            MOST_TRIED images, all are tried.
    """
    images, failures = try_read(listing, decoding, indices)
    if failures:
        complete = indices is None
        if not complete and len(listing.members) <= MOST_TRIED:
            failures |= find_failures(listing, decoding)
            complete = True
        raise UserError(explain_failures(listing, failures, complete))
    return images


def try_read(
    listing: Listing, decoding: Decoding, indices: Sequence[int] | None = None, look: Look | None = None
) -> tuple[Tensor, Failures]:
    """Return images as `read`, and the failures; the rows of images that cannot be read are undefined.

    `look` sees every image before it is converted, in several threads.
    """
    chosen = range(len(listing.members)) if indices is None else indices
    out = torch.empty(len(chosen), decoding.channels, decoding.size, decoding.size, dtype=torch.uint8)
    pixels = out.numpy()

    def fill(row: int, file: BytesIO) -> None:
        pixels[row] = decode(file, listing.members[chosen[row]], decoding, look)

    return out, attempt(listing, chosen, fill)


def check_headers(listing: Listing, chosen: Sequence[int], size: int | None = None, hint: str = "") -> int:
    """Read the headers of images, so that damage is found before the work starts; return how many are transparent.

    Images that may be transparent are decoded.

    Args:
        listing: the images.
        chosen: their indices.
        size: height and width that all must have; None allows any.
        hint: what to do about images that cannot be read.

    Raises:
        UserError: a header cannot be read, or tells another size; the message names the first ones.
    """
    transparent = []

    def look(row: int, file: BytesIO) -> None:
        name = listing.members[chosen[row]]
        with open_image(file, name) as image:
            if size is not None:
                check_size(image, name, size)
            if is_transparent(image):
                transparent.append(row)

    failures = attempt(listing, chosen, look)
    if failures:
        complete = len(chosen) == len(listing.members)
        raise UserError(explain_failures(listing, failures, complete) + hint)
    return len(transparent)


def find_failures(listing: Listing, decoding: Decoding) -> Failures:
    """Return all images of a listing that cannot be read."""

    def discard(i: int, file: BytesIO) -> None:
        decode(file, listing.members[i], decoding)

    return attempt(listing, range(len(listing.members)), discard)


def attempt(listing: Listing, chosen: Sequence[int], work: Callable[[int, BytesIO], None]) -> Failures:
    """Do `work` on the row and the contents of each image of `chosen`, in threads; return its UserErrors."""
    formats()  # loads the plugins before the threads start, which would race
    failures: Failures = {}
    with listing.open() as fetch:

        def try_one(row: int) -> str | None:
            try:
                work(row, fetch(chosen[row]))
            except UserError as error:
                return str(error)
            return None

        threads = min(16, os.cpu_count() or 1)
        results = in_threads(try_one, range(len(chosen)), threads)
        with track("reading images", len(chosen), "image", delay=_PATIENCE) as progress:
            for i, failure in zip(chosen, results, strict=True):
                progress.update()
                if failure is not None:
                    failures[i] = failure
    return failures


def explain_failures(listing: Listing, failures: Failures, complete: bool = True, where: str = "") -> str:
    """Return the message of a UserError about images that cannot be read.

    Args:
        listing: the images.
        failures: the images that cannot be read.
        complete: whether all images were tried.
        where: name of the file with the whole list; empty if there is none.
    """
    reasons = [failures[i] for i in sorted(failures)]
    least = "" if complete else "at least "
    text = f"{listing.path}: {least}{len(reasons):,} of {len(listing.members):,} images cannot be read"
    if where:
        text += f" (list in {where})"
    more = len(reasons) - MOST_NAMED
    named = "; ".join(reasons[:MOST_NAMED])
    if more > 0:
        named += f"; and {more:,} more"
    return f"{text}: {named}"
