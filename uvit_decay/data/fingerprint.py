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
        name = "/".join(PurePosixPath(listing.members[index]).parts[-2:])
        digest.update(f"{name}\n".encode(errors="surrogateescape"))
    measured = chosen if listing.in_archive else [chosen[row] for row in spread(len(chosen), MOST_SIZES)]
    digest.update(repr(listing.states(measured)).encode())
    return digest.hexdigest()
