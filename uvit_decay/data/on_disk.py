"""Sets of images that are decoded from their files for every batch."""

from __future__ import annotations

import torch
from torch import Tensor

from uvit_decay.data.batches import ImageSet, InMemory
from uvit_decay.data.decoding import AS_TRAINED, Crop, Reading, centre_crop
from uvit_decay.data.fingerprint import SPREAD_IMAGES, spread
from uvit_decay.data.image_files import Listing, read, try_read


class OnDisk(ImageSet):
    """An ImageSet that decodes its images from their files for every batch.

    Args:
        listing: images, of which the set has some.
        chosen: their indices in the listing.
        image_size: height and width in pixels.
        channels: 3 for RGB, 1 for grey.
        crop: scales and crops an image to this size.
        reading: how values of a file become 8 bits.
    """

    def __init__(
        self,
        listing: Listing,
        chosen: list[int],
        image_size: int,
        channels: int,
        crop: Crop = centre_crop,
        reading: Reading = AS_TRAINED,
    ) -> None:
        self.listing = listing
        self.chosen = chosen
        self.image_size = image_size
        self.channels = channels
        self.crop = crop
        self.reading = reading
        self.labels = torch.tensor(listing.labels)[chosen]

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = [self.chosen[i] for i in indices]
        images = read(self.listing, self.image_size, self.channels, chosen, crop=self.crop, reading=self.reading)
        return images, self.labels[indices]


def find_brightest(images: ImageSet) -> int:
    """Return the brightest value of a set in memory, or of SPREAD_IMAGES images of a set on disk that can be read."""
    if isinstance(images, InMemory):
        return int(images.images.max())
    chosen = [images.chosen[row] for row in spread(len(images), SPREAD_IMAGES)]
    shape = images.image_size, images.channels
    pixels, failures = try_read(images.listing, *shape, chosen, crop=images.crop, reading=images.reading)
    kept = [row for row, i in enumerate(chosen) if i not in failures]
    return int(pixels[kept].max()) if kept else 255
