"""Mixup and CutMix of a batch, by timm, as functions of (seed, global batch) on any number of processes."""

from __future__ import annotations

import torch
from torch import Tensor

from uvit_decay.data.augment import seeded
from uvit_decay.data.batches import Batch
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import generator


class Mixing:
    """Mix every image of a batch with its neighbour, 2k with 2k + 1, in one proportion for the global batch.

    Neighbours are on one device, so that the result does not depend on how the global batch is divided. MAE's code
    draws kind and proportion for each batch of 32 on a device.

    Args:
        mixup: Beta parameter of Mixup; 0 for none.
        cutmix: Beta parameter of CutMix; 0 for none.
        switch_prob: probability of CutMix where both are asked for.
        label_smoothing: see `ClassifyTask`.
        num_classes: classes K.
        seed: seed of the proportions and of CutMix's boxes.
    """

    def __init__(
        self, mixup: float, cutmix: float, switch_prob: float, label_smoothing: float, num_classes: int, seed: int
    ) -> None:
        from timm.data.mixup import Mixup  # takes seconds to import

        options = {"switch_prob": switch_prob, "label_smoothing": label_smoothing, "num_classes": num_classes}
        self.mix, self.seed = Mixup(mixup, cutmix, mode="batch", **options), seed

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return mixed images (b, c, h, w) and their targets, float32 (b, K); b is even."""
        count, device = len(batch.images), batch.images.device
        # timm mixes image i with image b - 1 - i: this order makes them neighbours of the batch.
        order = torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2).flip(0)])
        there, back = order.to(device, non_blocking=True), order.argsort().to(device, non_blocking=True)
        word = generator("mix", self.seed, batch.number).initial_seed() % 2**32  # numpy takes 32 bits
        with seeded((word, word)):
            images, targets = self.mix(batch.images[there], batch.labels[there])
        return images[back], targets[back]


def check_pairs(images: int) -> None:
    """Raise a UserError if a piece of so many images cannot be mixed in pairs."""
    if images % 2:
        raise UserError(
            f"mixup and cutmix mix neighbours, and a piece of {images} images is odd: change --data.batch_size or "
            "--data.device_batch_size"
        )
