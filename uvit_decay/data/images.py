"""Your own pictures: a folder, zip or tar of class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.data.base import ImageData
from uvit_decay.data.classes import class_list
from uvit_decay.data.pictures import Listing, list_pictures, read
from uvit_decay.data.steps import ImageSet, InMemory
from uvit_decay.errors import UserError
from uvit_decay.randomness import generator


class OnDisk(ImageSet):
    """An ImageSet that decodes the pictures `chosen` from a listing anew for every batch."""

    def __init__(self, listing: Listing, chosen: list[int], image_size: int, channels: int) -> None:
        self.listing, self.chosen, self.image_size, self.channels = listing, chosen, image_size, channels
        self.labels = torch.tensor(listing.labels)[chosen]

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        wanted = [self.chosen[i] for i in indices]
        return read(self.listing, self.image_size, self.channels, wanted), self.labels[indices]


class Images(ImageData):
    """A folder, zip or tar of class folders (`<class>/<picture>`), or of pictures without classes; see `FORMATS`.

    ImageNet's official tar of tars is read as it is. Tars must not be compressed, and nothing is unpacked.
    Pictures are brought to the size by the centre crop that ADM, DiT, SiT and U-ViT use; as there, EXIF's orientation
    is ignored.

    Args:
        path: folder, zip or tar of the training pictures.
        test_path: folder, zip or tar with the same classes, for validation loss and probes.
        holdout: where there is no test_path, the share of each class that is kept from training for them; 0 keeps none.
        classes: a named class list (imagenet-100/cmc, imagenet-1k) or a text file of them; null takes all folders.
        image_size: height and width in pixels.
        channels: 3 for RGB, 1 for grey.
        batch_size: global batch size, over all devices.
        device_batch_size: pictures that a device takes at once, see `ImageData`.
        flip: mirror half of the training pictures.
        memory_gb: sets that are smaller than this as uint8 are read once and kept in memory, by each process.
        num_workers: reader processes on each device for larger sets.
        seed: of the order and the flips; the held-out part is always the same.

    Raises:
        UserError: nothing there to read, unreadable pictures, classes that differ between the two paths, or listed
            classes that one of them lacks.
    """

    def __init__(
        self,
        path: str,
        test_path: str | None = None,
        holdout: float = 0.0,
        classes: str | None = None,
        image_size: int = 32,
        channels: int = 3,
        batch_size: int = 128,
        device_batch_size: int | None = None,
        flip: bool = True,
        memory_gb: float = 4.0,
        num_workers: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(image_size, channels, batch_size, flip, seed, num_workers, device_batch_size)
        if not 0.0 <= holdout < 1.0:
            raise UserError(f"holdout is a share in [0, 1), got {holdout}")
        self.path, self.test_path, self.holdout, self.memory_gb = path, test_path, holdout, memory_gb
        self.classes = classes

    @property
    def name(self) -> str:
        name = Path(self.path).stem
        return name if self.classes is None else f"{name}, classes {self.classes}"

    def load(self) -> None:
        wanted = None if self.classes is None else class_list(self.classes)
        listing = list_pictures(self.path, wanted)
        self.class_names = listing.class_names
        training, held_out = self._split(listing)
        self.train = self._set(listing, training)
        if self.test_path is not None:
            test = list_pictures(self.test_path, wanted)
            if test.class_names != listing.class_names:
                raise UserError(f"{self.test_path} and {self.path} have different classes")
            self.test = self._set(test, list(range(len(test.members))))
        elif held_out:
            self.test = self._set(listing, held_out)
        if isinstance(self.train, InMemory):
            self.num_workers = 0

    def _split(self, listing: Listing) -> tuple[list[int], list[int]]:
        """Indices for training and held-out ones, the same share of every class."""
        if self.test_path is not None or self.holdout == 0.0:
            return list(range(len(listing.members))), []
        labels = np.array(listing.labels)
        held_out: list[int] = []
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            shuffled = torch.randperm(len(members), generator=generator("holdout", int(label))).numpy()
            held_out += members[shuffled[: round(self.holdout * len(members))]].tolist()
        if len(held_out) in (0, len(labels)):
            raise UserError(f"holdout {self.holdout} of {len(labels)} pictures leaves one part empty")
        return sorted(set(range(len(labels))) - set(held_out)), sorted(held_out)

    def _set(self, listing: Listing, chosen: list[int]) -> ImageSet:
        size = len(chosen) * self.channels * self.image_size**2
        if size <= self.memory_gb * 2**30:
            return InMemory(read(listing, self.image_size, self.channels, chosen), torch.tensor(listing.labels)[chosen])
        rank_zero_info(f"{len(chosen)} pictures are read from disk at every epoch ({size / 2**30:.1f} GiB)")
        return OnDisk(listing, chosen, self.image_size, self.channels)
