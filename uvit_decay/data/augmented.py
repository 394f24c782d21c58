"""The data module of randomly cropped images, for MAE and classifiers: decoded per batch, or cropped in memory."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from torch import Tensor

from uvit_decay.data.augment import Augment, AugmentDraw, erase_boxes, global_seeds, rand_augment
from uvit_decay.data.batches import Augmentation, Batch, ImageSet, InMemory
from uvit_decay.data.decoding import Decoding, ResizedCentre, Side, decode_box, planes
from uvit_decay.data.folder import Images
from uvit_decay.data.listing import Listing
from uvit_decay.data.reading import OnDisk, common_side
from uvit_decay.terminal.typed import Within, check_types


class Streamed(OnDisk):
    """Images that are decoded for every batch from their files; read by index, they have the test crop."""

    def augment(self, indices: list[int], draws: list[AugmentDraw]) -> tuple[Tensor, Tensor]:
        """Return randomly changed images, uint8 (b, c, size, size), and labels (b,)."""
        size = self.decoding.size
        out = np.empty((len(indices), self.decoding.channels, size, size), np.uint8)
        with self.listing.open() as fetch:
            for pixels, index, draw in zip(out, indices, draws, strict=True):
                i = self.chosen[index]
                image = decode_box(fetch(i), self.listing.members[i], self.decoding, draw.box)
                image = _change(image, draw)
                pixels[:] = draw.moved(planes(image))
        return torch.from_numpy(out), self.labels[indices]


def _change(image: Image.Image, draw: AugmentDraw) -> Image.Image:
    """Mirror a cropped image and apply RandAugment, as drawn."""
    if draw.mirror:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if draw.augment.rand_augment is None:
        return image
    change = rand_augment(draw.augment.rand_augment, image.width, len(image.getbands()))
    with global_seeds(draw.seeds):
        return change(image)


class Cached(InMemory):
    """Square images of one size in memory, cropped on their device; read by index, they have the test crop.

    Args:
        images: uint8 (n, c, side, side).
        labels: int64 (n,).
        image_size: height and width of crops.
        crop: the test crop.
    """

    def __init__(self, images: Tensor, labels: Tensor, image_size: int, crop: ResizedCentre) -> None:
        super().__init__(images, labels)
        self.image_size = image_size
        self.crop = crop

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = super().__getitem__(indices)
        return self.crop(images, self.image_size), labels

    def augment(self, indices: list[int], draws: list[AugmentDraw]) -> tuple[Tensor, Tensor]:
        """Return randomly changed images, uint8 (b, c, size, size) on the device of the set, and labels (b,)."""
        from torchvision.transforms.v2 import InterpolationMode, functional  # takes a second to import

        images, labels = super().__getitem__(indices)
        height, width = images.shape[2:]
        size = [self.image_size, self.image_size]
        changed = []
        for image, draw in zip(images, draws, strict=True):
            top, left, h, w = draw.box(height, width)
            part = functional.resized_crop(image, top, left, h, w, size, InterpolationMode.BICUBIC)
            if draw.mirror:
                part = part.flip(-1)
            changed.append(draw.moved(part))
        return torch.stack(changed), labels


def _augment_batch(
    augment: Augment, seed: int, images: Streamed | Cached, indices: list[int], rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return changed images and labels: an `Augmentation` once `augment` and `seed` are given."""
    return images.augment(indices, augment.draws(seed, rows))


@check_types
class AugmentedImages(Images):
    """Images of a folder, zip or tar (see `Images`), randomly changed as `augment` says.

    The crop is the bicubic RandomResizedCrop of torchvision or MAE. Training images are decoded from their files for
    every batch, in `num_workers` processes. If all are squares of one size that fit in `memory_gb`, such as CIFAR's,
    they are read once and cropped on the device, except with RandAugment, which uses PIL's operations.
    All changes are functions of the seed and of the position in training. Test images, and training images that probes
    read, have the test crop.

    Args:
        path: folder, zip or tar of the training images.
        image_size: height and width in pixels. Null: on the command line the network's, if it is set, or if it is
            null, too, the common size of the images, see `find_sizes`; otherwise 224.
        batch_size: global batch size, over all devices.
        augment: the random changes of training images.
        test_crop: the test crop scales the shorter side to image_size / test_crop and takes the centre; use 1 for small
            pictures whose object fills the frame.
        options: of `Images`: test_path, holdout, classes, channels, device_batch_size, memory_gb, num_workers, seed,
            labels, name_column, label_column, test_labels, skip_unreadable, white.
    """

    usual_size = 224  # pixels

    def __init__(
        self,
        path: str | Path,
        image_size: Side | None = None,
        batch_size: int = 256,
        augment: Augment = Augment(),  # noqa: B008  frozen
        test_crop: Annotated[float, Within("(0, 1]")] = 0.875,
        **options: Any,
    ) -> None:
        super().__init__(path, image_size=image_size, batch_size=batch_size, flip=augment.flip, **options)
        self.augment = augment
        self.crop = ResizedCentre(test_crop)

    def _train_set(self, listing: Listing, chosen: list[int]) -> ImageSet:
        side = None
        if self.augment.rand_augment is None and chosen:
            most_pixels = self.memory_gb * 2**30 / (len(chosen) * self.channels)
            side = common_side(listing, chosen, math.isqrt(int(most_pixels)))
        if side is None:
            rank_zero_info(f"{len(chosen)} training images are decoded whenever they are read")
            self._check_headers(listing, chosen)
            return Streamed(listing, chosen, self.decoding)
        whole = Decoding(side, self.channels, exact=True, reading=self.reading)
        images = self._read_all(listing, chosen, whole)
        labels = torch.tensor(listing.labels)[chosen]
        return Cached(images, labels, self.image_size, self.crop)

    def describe_pictures(self) -> str:
        return f"shorter side {self.crop.shorter_side(self.image_size)}, bicubic, centre {self.image_size}"

    def augmentation(self) -> Augmentation:
        return partial(_augment_batch, self.augment, self.seed)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        batch = super().on_after_batch_transfer(batch, dataloader_idx)
        if not (self.augment.erase and self.trainer.training):
            return batch
        images = erase_boxes(batch.images, self.augment.erase, self.seed, batch.sample_ids_on("cpu"))
        return batch._replace(images=images)
