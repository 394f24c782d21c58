"""What every data module offers: its sets, its classes, and step-indexed loaders."""

from __future__ import annotations

from abc import abstractmethod

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from uvit_decay.data.steps import Batch, ImageSet, StepLoader, StepSampler
from uvit_decay.randomness import BatchRandom


class InMemory:
    """An ImageSet in memory: uint8 images (n, c, h, w) and int64 labels (n,)."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


class ImageData(LightningDataModule):
    """Pictures for training and testing. After `setup`, `train` and `test` (or None) and `class_names` are there.

    Args:
        image_size: height and width in pixels.
        channels: 3 for RGB, 1 for grey.
        batch_size: global batch size, over all devices.
        flip: mirror half of the training pictures.
        seed: of the order and the flips.
        num_workers: reader processes on each device; 0 for sets in memory.
    """

    def __init__(
        self, image_size: int, channels: int, batch_size: int, flip: bool, seed: int, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.image_size, self.channels, self.batch_size = image_size, channels, batch_size
        self.flip, self.seed, self.num_workers = flip, seed, num_workers
        self.train: ImageSet | None = None
        self.test: ImageSet | None = None
        self.class_names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What reports call the training set."""
        return type(self).__name__.lower()

    @abstractmethod
    def load(self) -> None:
        """Read the pictures: set `train`, `test` and `class_names`."""

    def setup(self, stage: str | None = None) -> None:
        if self.train is None:
            self.load()
        for loader in (self.train_dataloader, self.val_dataloader):
            loader()  # a batch size that does not fit is found now, before anything takes time

    def _loader(self, images: ImageSet, batch_size: int, shuffle: bool) -> StepLoader:
        rank, ranks = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        sampler = StepSampler(len(images), batch_size, self.seed, rank, ranks, shuffle)
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return StepLoader(images, sampler, self.num_workers, pin_memory=on_gpu)

    def train_dataloader(self) -> StepLoader:
        return self._loader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> StepLoader | list[StepLoader]:
        """Whole global batches of the test set, in order."""
        if self.test is None:
            return []
        ranks = self.trainer.world_size if self.trainer else 1
        return self._loader(self.test, min(self.batch_size, len(self.test) // ranks * ranks), shuffle=False)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if not (self.flip and self.trainer and self.trainer.training):
            return batch
        images = batch.images
        random = BatchRandom(
            "flip",
            self.seed,
            batch.number,
            first=batch.first,
            count=len(images),
            total=batch.total,
            device=images.device,
        )
        mirrored = random.uniform(1, 1, 1) < 0.5
        return batch._replace(images=torch.where(mirrored, images.flip(-1), images))
