"""Images that cannot be read: found once, left out and stored in a list; and the line that says what was read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import PIL
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.data.decoding import AS_TRAINED, Reading, check_image, formats
from uvit_decay.data.file_kinds import count_kinds, hint_at_heif
from uvit_decay.data.fingerprint import hash_files, hash_states, spread
from uvit_decay.data.image_files import Failures, Listing, attempt, common_side, explain_failures
from uvit_decay.images.class_names import in_words
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import cache_folder, check_writable, replacing
from uvit_decay.runtime.validation import read_json, write_json

FEW = 10  # images whose headers tell whether they are enlarged
ENLARGED = 2  # factor from which enlarged images are remarked on
UNREAD = "unread.txt"  # the list in the folder of a run: a line for each image, its name and the reason


def describe_listing(listing: Listing, size: int | None = None, where: str = "") -> str:
    """Return what was read and what was not: "812 pictures in 10 classes, 32x32; not read: 3 .txt (no pictures)".

    Args:
        listing: the images.
        size: height and width to which they are cropped; None if it is not known.
        where: name of the file with the list of the images that were left out; empty if there is none.
    """
    text = f"{len(listing.members):,} pictures"
    if listing.class_names:
        text += f" in {len(listing.class_names):,} classes"
    if size is not None:
        text += f", {size}x{size}"
    unread = []
    if listing.others:
        unread.append(count_kinds(listing.others))
    if listing.left_out:
        place = f" (list in {where})" if where else ""
        unread.append(f"{len(listing.left_out):,} damaged{place}")
    if unread:
        text += f"; not read: {', '.join(unread)}"
    return text + hint_at_heif(listing.others)


def remark_on_enlarging(listing: Listing, chosen: Sequence[int], size: int) -> None:
    """Print a remark if images, all of one size, are enlarged to this size by a factor of ENLARGED or more.

    Args:
        listing: the images.
        chosen: indices of the training images, of which the headers of a few are read.
        size: height and width to which they are enlarged.
    """
    few = [chosen[i] for i in spread(len(chosen), FEW)]
    side = common_side(listing, few, size)
    if side is not None and side * ENLARGED <= size:
        flags = f"--data.image_size {side} --model.net.image_size {side}"
        text = f"images of {side}x{side} pixels are enlarged to {size}x{size}"
        rank_zero_info(f"{text}; {flags} trains on them as they are")


def leave_out_unreadable(listing: Listing, reading: Reading = AS_TRAINED) -> Listing:
    """Return a listing without the images that cannot be read; `left_out` has a line about each of them.

    All images are decoded once. The result is stored in the cache of this machine and used while names, sizes and
    modification times of the files are the same; of several processes that need it, one decodes.

    Raises:
        UserError: no image can be read.
    """
    file = _cache_file(listing, reading)
    check_writable(file)
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            failures = _find_unreadable(listing, reading)
            write_json(file, {str(i): reason for i, reason in failures.items()})
        stored = read_json(file, dict[str, str])
    failures: Failures = {int(i): reason for i, reason in stored.items()}
    kept = [i for i in range(len(listing.members)) if i not in failures]
    if not kept:
        raise UserError(explain_failures(listing, failures))
    rest = replace(listing.take(kept), left_out=tuple(failures.values()))
    _warn_of_emptied_classes(listing, rest)
    return rest


def _warn_of_emptied_classes(listing: Listing, rest: Listing) -> None:
    """Warn of classes all of whose images cannot be read."""
    names = [listing.class_names[label] for label in sorted({*listing.labels} - {*rest.labels})]
    if names:
        rank_zero_info(f"warning: classes without a picture that can be read: {', '.join(in_words(names)[:FEW])}")


def _find_unreadable(listing: Listing, reading: Reading) -> Failures:
    def check(i: int, file: BytesIO) -> None:
        check_image(file, listing.members[i], reading)

    return attempt(listing, range(len(listing.members)), check)


def _cache_file(listing: Listing, reading: Reading) -> Path:
    """Return the file of the list in the cache, named by the files of the listing and by what reads them."""
    everything = range(len(listing.members))
    key = [hash_states(listing), hash_files(listing, everything), reading.key, PIL.__version__, formats()]
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return cache_folder("unread") / f"{digest[:32]}.json"


def store_list(lines: Sequence[str], file: Path) -> None:
    """Write a list of images that cannot be read, a line for each."""
    with replacing(file) as opened:
        for line in lines:
            opened.write(f"{line}\n".encode(errors="backslashreplace"))
