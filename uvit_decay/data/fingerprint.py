"""Fingerprints of images: files by their names and sizes, tensors by their bytes. No image is decoded.

A resumed run is refused if the fingerprint of its training images differs from the fingerprint in its checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from uvit_decay.data.classes import split_parts
from uvit_decay.data.listing import Listing
from uvit_decay.terminal.errors import explain

MOST_COMPARED = 64  # files that are read to compare their bytes
MOST_SIZES = 10_000  # files of a folder whose sizes are read; on a network disk each takes up to a millisecond
MOST_MEASURED = 1000  # images whose headers are read: to find their size, and damage before a run starts
SPREAD_IMAGES = 64  # images that are read of a set of unknown kind


def spread(total: int, most: int) -> list[int]:
    """Return all indices below `total`, or `most` of them at even distances, the first and the last included."""
    if total <= most:
        return list(range(total))
    places = np.linspace(0, total - 1, most).round()
    return places.astype(int).tolist()


def hash_array(images: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and bytes of a tensor on any device."""
    layout = (str(images.dtype), tuple(images.shape))
    digest = hashlib.sha256(repr(layout).encode())
    digest.update(images.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def hash_files(listing: Listing, chosen: Sequence[int]) -> str:
    """Return the SHA-256 of the image files at the indices `chosen` of a listing.

    It covers the class folder of every file and its path below. In an archive it also covers all sizes, and in a zip
    the CRC-32s in the zip's directory. In a folder it covers the sizes of at most MOST_SIZES files, spread evenly. The
    place of the folder or archive, and folders around the class folders, do not count.
    """
    digest = hashlib.sha256()
    for index in chosen:
        line = f"{_short_name(listing, index)}\n"
        digest.update(line.encode(errors="surrogateescape"))
    measured = chosen
    if not listing.in_archive:
        measured = [chosen[row] for row in spread(len(chosen), MOST_SIZES)]
    digest.update(repr(listing.states(measured)).encode())
    return digest.hexdigest()


def hash_states(listing: Listing) -> str:
    """Return the SHA-256 of the path, and of the sizes and modification times of all files; none is read.

    Unlike `hash_files` it tells whether files of this machine have been touched.
    """
    path = listing.path.resolve()
    digest = hashlib.sha256(repr((str(path), listing.members)).encode())
    with explain(f"{path} has changed", OSError):
        for name in listing.stored_in:
            stat = (path / name).stat()
            digest.update(repr((name, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()


def name_shared(train: Listing, chosen: Sequence[int], test: Listing) -> str | None:
    """Return the name of a test image that is also one of the training images `chosen`; None if none is found.

    Only images with the same class folder and path below are compared: first the sizes of at most MOST_SIZES pairs,
    then the bytes of at most MOST_COMPARED pairs of equal size, each spread evenly.
    """
    in_training = {_short_name(train, i): i for i in chosen}
    pairs = []  # of indices of a training image and of a test image
    for theirs in range(len(test.members)):
        ours = in_training.get(_short_name(test, theirs))
        if ours is not None:
            pairs.append((ours, theirs))
    pairs = [pairs[row] for row in spread(len(pairs), MOST_SIZES)]
    train_states = train.states([ours for ours, _ in pairs])
    test_states = test.states([theirs for _, theirs in pairs])
    equal = []
    for pair, state, other in zip(pairs, train_states, test_states, strict=True):
        if state[0] == other[0]:  # the first entry of a state is the size
            equal.append(pair)
    with train.open() as fetch_train, test.open() as fetch_test:
        for row in spread(len(equal), MOST_COMPARED):
            ours, theirs = equal[row]
            if fetch_train(ours).getvalue() == fetch_test(theirs).getvalue():
                return test.members[theirs]
    return None


def _short_name(listing: Listing, index: int) -> str:
    """Return the class folder of an image file and its path below; with `labels leaf`, folder and file name."""
    parts = split_parts(listing.members[index])
    start = -2 if listing.depth is None else listing.depth
    return "/".join(parts[start:])
