"""Read listed images into tensors, at once or for every batch, and find those that cannot be read.

All values are uint8; data modules convert them to float. `decoding.py` turns the bytes of a file into pixels.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import PIL
import torch
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.data.batches import ImageSet, InMemory
from uvit_decay.data.decoding import AS_TRAINED, Decoding, Reading, check_image, check_size, decode, formats, open_image
from uvit_decay.data.fingerprint import SPREAD_IMAGES, hash_files, hash_states, spread
from uvit_decay.data.listing import Listing
from uvit_decay.files.validation import read_json, write_json
from uvit_decay.files.writing import cache_folder, check_writable, replacing
from uvit_decay.runtime.concurrency import in_threads
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.progress import track

_PATIENCE = 3.0  # seconds after which a bar appears
MOST_NAMED = 8  # images that cannot be read in a message
UNREAD = "unread.txt"  # the list in the folder of a run: a line for each image, its name and the reason
EIGHTH = 32  # of 255: images that stay darker have probably another range

Failures = dict[int, str]  # index of an image that cannot be read, and why, in a line that begins with its name


def size_of(listing: Listing) -> int:
    """Return the side of the first image, in pixels; raise a UserError if it is not square or cannot be read."""
    name = listing.members[0]
    with listing.open() as fetch, open_image(fetch(0), name) as image:
        width, height = image.size
    if width != height:
        raise UserError(f"{listing.path}: {name} is {width}x{height}, not square; to crop all, set `image_size`")
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
    """
    images, failures = try_read(listing, decoding, indices)
    if failures:
        raise UserError(explain_failures(listing, failures, complete=indices is None))
    return images


def try_read(listing: Listing, decoding: Decoding, indices: Sequence[int] | None = None) -> tuple[Tensor, Failures]:
    """Return images as `read`, and the failures; the rows of images that cannot be read are undefined."""
    chosen = range(len(listing.members)) if indices is None else indices
    out = torch.empty(len(chosen), decoding.channels, decoding.size, decoding.size, dtype=torch.uint8)
    pixels = out.numpy()

    def fill(row: int, file: BytesIO) -> None:
        pixels[row] = decode(file, listing.members[chosen[row]], decoding)

    return out, attempt(listing, chosen, fill)


def check_headers(listing: Listing, chosen: Sequence[int], size: int | None = None, hint: str = "") -> None:
    """Read the headers of images, so that damage is found before the work starts.

    Args:
        listing: the images.
        chosen: their indices.
        size: height and width that all must have; None allows any.
        hint: what to do about images that cannot be read.
    """

    def look(row: int, file: BytesIO) -> None:
        name = listing.members[chosen[row]]
        with open_image(file, name) as image:
            if size is not None:
                check_size(image, name, size)

    failures = attempt(listing, chosen, look)
    if failures:
        complete = len(chosen) == len(listing.members)
        raise UserError(explain_failures(listing, failures, complete) + hint)


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


class OnDisk(ImageSet):
    """An ImageSet that decodes its images from their files for every batch.

    Args:
        listing: images, of which the set has some.
        chosen: their indices in the listing.
        decoding: size, channels and crop of the images.
    """

    def __init__(self, listing: Listing, chosen: list[int], decoding: Decoding) -> None:
        self.listing = listing
        self.chosen = chosen
        self.decoding = decoding
        self.crop = decoding.crop
        self.labels = torch.tensor(listing.labels)[chosen]

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = [self.chosen[i] for i in indices]
        return read(self.listing, self.decoding, chosen), self.labels[indices]


def warn_of_dark_images(where: str, images: ImageSet, hint: str) -> None:
    """Warn if no image of a sample of a set reaches an eighth of the range.

    Args:
        where: the images, for the message.
        images: the set.
        hint: what helps.
    """
    if isinstance(images, InMemory):
        brightest = int(images.images.max())
    else:
        chosen = [images.chosen[row] for row in spread(len(images), SPREAD_IMAGES)]
        pixels, failures = try_read(images.listing, images.decoding, chosen)
        kept = [row for row, i in enumerate(chosen) if i not in failures]
        brightest = int(pixels[kept].max()) if kept else 255
    if brightest < EIGHTH:
        rank_zero_info(f"warning: {where}: no pixel is brighter than {brightest} of 255; {hint}")


def leave_out_unreadable(listing: Listing, reading: Reading = AS_TRAINED) -> Listing:
    """Return a listing without the images that cannot be read; `left_out` has a line about each of them.

    All images are decoded once. The result is stored in the cache of this machine and used while names, sizes and
    modification times of the files are the same; of several processes that need it, one decodes.
    """

    def check(i: int, file: BytesIO) -> None:
        check_image(file, listing.members[i], reading)

    everything = range(len(listing.members))
    key = [hash_states(listing), hash_files(listing, everything), reading.key, PIL.__version__, formats()]
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    file = cache_folder("unread") / f"{digest[:32]}.json"
    check_writable(file)
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            failures = attempt(listing, everything, check)
            write_json(file, {str(i): reason for i, reason in failures.items()})
        stored = read_json(file, dict[str, str])
    failures: Failures = {int(i): reason for i, reason in stored.items()}
    kept = [i for i in everything if i not in failures]
    if not kept:
        raise UserError(explain_failures(listing, failures))
    return replace(listing.take(kept), left_out=tuple(failures.values()))


def store_list(lines: Sequence[str], file: Path) -> None:
    """Write a list of images that cannot be read, a line for each."""
    with replacing(file) as opened:
        for line in lines:
            opened.write(f"{line}\n".encode(errors="backslashreplace"))
