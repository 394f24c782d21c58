"""The handwritten digits bundled with scikit-learn: real data without a download."""

from __future__ import annotations

import numpy as np
import torch

from uvit_decay.data.batches import InMemory
from uvit_decay.data.datamodule import ImageData
from uvit_decay.terminal.typed import check_types


@check_types
class Digits(ImageData):
    """1797 grey 8x8 digits (UCI, bundled with scikit-learn), 1437 for training and 360 for testing, stratified.

    Args:
        batch_size: global batch size.
        device_batch_size: most digits per forward pass on a device, see `ImageData`.
        seed: random seed of the image order; the split does not depend on it.
    """

    def __init__(self, batch_size: int = 32, device_batch_size: int | None = None, seed: int = 0) -> None:
        super().__init__(8, 1, batch_size, flip=False, seed=seed, device_batch_size=device_batch_size)

    def load(self) -> None:
        """Load the digits, scaled from 0..16 to 0..255, and split them."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        scaled = (pixels / 16 * 255).round()
        images = scaled.astype(np.uint8).reshape(-1, 1, 8, 8)
        parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
        train, test, train_labels, test_labels = map(torch.from_numpy, parts)
        self.train = InMemory(train, train_labels)
        self.test = InMemory(test, test_labels)
        self.class_names = tuple("0123456789")
