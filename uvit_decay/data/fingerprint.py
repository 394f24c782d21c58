"""Fingerprints of images: files by their names and sizes, tensors by their bytes. No image is decoded.

A resumed run is refused if its training images have another fingerprint than those of its checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np
from torch import Tensor

from uvit_decay.data.image_files import Listing

MOST_COMPARED = 64  # files that are read to compare their bytes
MOST_SIZES = 10_000  # files of a folder whose sizes are asked for; on a network disk each takes up to a millisecond
SPREAD_IMAGES = 64  # images of a set of unknown kind that are read


def spread(total: int, most: int) -> list[int]:
    """Return all indices below `total`, or `most` of them at even distances, the first and the last included."""
    if total <= most:
        return list(range(total))
    return np.linspace(0, total - 1, most).round().astype(int).tolist()


def hash_array(images: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and bytes of a tensor on any device."""
    digest = hashlib.sha256(repr((str(images.dtype), tuple(images.shape))).encode())
    digest.update(images.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def hash_files(listing: Listing, chosen: Sequence[int]) -> str:
    """Return the SHA-256 of the image files at the indices `chosen` of a listing.

    It covers the class folder and the name of every file and, in an archive, its size; in a zip also its CRC-32, which
    the zip's directory holds. Of the files in a folder, it covers the sizes of at most MOST_SIZES, spread evenly. The
    place of the folder or archive, and folders around the class folders, do not count.

    Raises:
        UserError: a file of the folder is gone.
    """
    digest = hashlib.sha256()
    for index in chosen:
        digest.update(f"{_short_name(listing, index)}\n".encode(errors="surrogateescape"))
    measured = chosen if listing.in_archive else [chosen[row] for row in spread(len(chosen), MOST_SIZES)]
    digest.update(repr(listing.states(measured)).encode())
    return digest.hexdigest()


def name_shared(train: Listing, chosen: Sequence[int], test: Listing) -> str | None:
    """Return the name of a test image that is also one of the training images `chosen`, None if none is found.

    Only images of one class folder and file name are compared: first the sizes of at most MOST_SIZES of them, then the
    bytes of at most MOST_COMPARED of equal size, each spread evenly.
    """
    in_training = {_short_name(train, i): i for i in chosen}
    pairs = []
    for i in range(len(test.members)):
        if (same := in_training.get(_short_name(test, i))) is not None:
            pairs.append((same, i))
    pairs = [pairs[row] for row in spread(len(pairs), MOST_SIZES)]
    sizes = train.states([i for i, _ in pairs]), test.states([i for _, i in pairs])
    equal = [pair for pair, one, other in zip(pairs, *sizes, strict=True) if one[0] == other[0]]
    with train.opened() as fetch_train, test.opened() as fetch_test:
        for row in spread(len(equal), MOST_COMPARED):
            ours, theirs = equal[row]
            if fetch_train(ours).getvalue() == fetch_test(theirs).getvalue():
                return test.members[theirs]
    return None


def _short_name(listing: Listing, index: int) -> str:
    """Return class folder and name of an image file."""
    return "/".join(PurePosixPath(listing.members[index]).parts[-2:])
