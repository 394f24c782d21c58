"""Sets of images that are decoded from their files for every batch."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.data.batches import ImageSet, InMemory
from uvit_decay.data.decoding import Decoding
from uvit_decay.data.fingerprint import SPREAD_IMAGES, spread
from uvit_decay.data.image_files import Listing, read, try_read

EIGHTH = 32  # of 255: images that stay darker have probably another range


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
    brightest = _find_brightest(images)
    if brightest < EIGHTH:
        rank_zero_info(f"warning: {where}: no pixel is brighter than {brightest} of 255; {hint}")


def _find_brightest(images: ImageSet) -> int:
    """Return the brightest value of a set in memory, or of SPREAD_IMAGES images of a set on disk that can be read."""
    if isinstance(images, InMemory):
        return int(images.images.max())
    chosen = [images.chosen[row] for row in spread(len(images), SPREAD_IMAGES)]
    pixels, failures = try_read(images.listing, images.decoding, chosen)
    kept = [row for row, i in enumerate(chosen) if i not in failures]
    return int(pixels[kept].max()) if kept else 255
