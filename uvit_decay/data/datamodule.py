"""The base class of all data modules: training and test sets, classes and step-indexed loaders."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.data.batches import Augmentation, Batch, ImageSet, InMemory, StepLoader, StepSampler, mirror_half
from uvit_decay.data.classes import class_hash
from uvit_decay.latents.space import LatentSpace
from uvit_decay.pictures import to_float, to_uint8
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, Positive, check_types

ON_DEVICE = 2**30  # bytes up to which an in-memory set is copied to each GPU


class Sizes(NamedTuple):
    """Sizes of a data set, which a network for it must have.

    Args:
        image_size: height and width in pixels, or in latent cells.
        channels: channels of the images.
        num_classes: number of classes; 0 for images without classes.
    """

    image_size: int
    channels: int
    num_classes: int


@check_types
class ImageData(LightningDataModule):
    """Images for training and testing: `setup` sets `train`, `test` (or None) and `class_names`.

    Args:
        image_size: height and width in pixels.
        channels: 3 for RGB, 1 for grey.
        batch_size: global batch size, over all devices.
        flip: mirror half of the training images.
        seed: random seed of the image order and the flips.
        num_workers: reader processes per device, at most one per CPU core; 0 for sets in memory.
        device_batch_size: most images per forward pass on a device; a larger share of the global batch is split into
            equal micro-batches, whose gradients are accumulated. Null: no split.
    """

    adjustable: tuple[str, ...] = ()  # which of image_size and channels are arguments of the class

    def __init__(
        self,
        image_size: Annotated[int, Bounds(0, 2**16)],  # 0 for latents until they are opened
        channels: Annotated[int, Bounds(0, 2**16)],
        batch_size: Positive,
        flip: bool,
        seed: Annotated[int, Bounds(0, 2**63 - 1)],
        num_workers: Annotated[int, Bounds(0)] = 0,
        device_batch_size: Positive | None = None,
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.channels = channels
        self.batch_size = batch_size
        self.flip = flip
        self.seed = seed
        self.num_workers = num_workers
        self.device_batch_size = device_batch_size
        self.train: ImageSet | None = None
        self.test: ImageSet | None = None
        self.class_names: tuple[str, ...] = ()
        self.find_run_folder: Callable[[], Path] | None = None  # set by train.py; lists of images are kept there
        self.overlap = ""  # for reports: which test images are also training images
        self._fingerprint: str | None = None
        self.latents: LatentSpace | None = None  # None for pixels
        self.micro_batches = 1  # accumulated on each device for a global batch
        self._in_steps: dict[str, Any] = {}  # the trainer's settings in steps, as the user gave them
        self.whole_test = False  # fill the last batch of validation, to use all images; set by tasks that count images

    @property
    def name(self) -> str:
        """Name of the training set in reports."""
        return type(self).__name__.lower()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the training images, their classes and labels, in their order; needs `setup`.

        It is computed once, so that all checkpoints of a run have the same fingerprint.
        """
        if self._fingerprint is None:
            # The classes and labels of the images have a hash of their own, as in all checkpoints.
            labels = sha256(self.train.labels.numpy().tobytes()).hexdigest()
            labelled = sha256((class_hash(self.class_names) + labels).encode()).hexdigest()
            self._fingerprint = sha256((labelled + self.content_hash()).encode()).hexdigest()
        return self._fingerprint

    def describe_pictures(self) -> str:
        """Return how the pictures were resized and cropped, for reports."""
        return f"as stored, {self.image_size}"

    def describe_test_images(self, trained_on: str | None = None) -> str:
        """Return the description of the test images for reports, with a remark if training images are among them.

        Args:
            trained_on: fingerprint of the images that the network was trained on; None if it is not known.
        """
        return self._add_overlap("the test images of the data set")

    def _add_overlap(self, text: str) -> str:
        return f"{text}; {self.overlap}" if self.overlap else text

    def content_hash(self) -> str:
        """Return a SHA-256 that identifies the stored training images; no image file is decoded."""
        return self.train.content_hash()

    def warn_of_overlap(self, overlap: str) -> None:
        """Warn that test images are also training images, and keep `overlap` for reports."""
        self.overlap = overlap
        rank_zero_info(f"warning: {overlap}; test results are not results on unseen images")

    @abstractmethod
    def load(self) -> None:
        """Read the images and set `train`, `test` and `class_names`."""

    def find_sizes(self) -> Sizes:
        """Return the sizes of the data set, for which train.py builds a network whose sizes are null.

        Unlike `setup` it is called before `prepare_data`. Data modules that know their sizes, or find them without
        decoding images, override it; here, the images are loaded.
        """
        if self.train is None:
            self.load()
        return Sizes(self.image_size, self.channels, len(self.class_names))

    def count_train(self) -> int | None:
        """Return the number of training images if it is known without decoding images, otherwise None."""
        return None if self.train is None else len(self.train)

    def network_input(self, stored: Tensor) -> Tensor:
        """Convert stored images to the input of networks: float32 (b, c, h, w)."""
        return to_float(stored)

    def preview(self, x: Tensor) -> Tensor:
        """Convert images in the networks' scale to images for display: uint8 (b, 1 or 3, h, w)."""
        return to_uint8(x)

    def setup(self, stage: str | None = None) -> None:
        if self.train is None:
            self.load()
        if stage == "validate" and self.test is None:
            raise UserError("validate needs test data; set `test_path` or, if the data set has it, `holdout`")
        sampler = self._train_sampler()  # checks the batch size before any slow work
        if stage == "fit" and self.trainer is not None:
            _ = self.fingerprint  # computed from the images as they are now, not at the first checkpoint
            self._accumulate(sampler)

    def teardown(self, stage: str) -> None:
        """Restore the settings of the trainer, which may be used for another fit."""
        if stage == "fit":
            self.trainer.accumulate_grad_batches = 1
            for name, value in self._in_steps.items():
                setattr(self.trainer, name, value)

    def _accumulate(self, sampler: StepSampler) -> None:
        """Let the trainer accumulate the micro-batches of a global batch, and print how it is divided."""
        configured = self.trainer.accumulate_grad_batches
        self.micro_batches = sampler.micro_batches
        if configured != 1:
            raise UserError(f"`accumulate_grad_batches` {configured}: set `device_batch_size` instead")
        self.trainer.accumulate_grad_batches = sampler.micro_batches
        self._count_micro_batches(sampler)
        images = sampler.share // sampler.micro_batches
        division = f"{sampler.num_replicas} x {images} images"
        if sampler.micro_batches > 1:
            division += f" x {sampler.micro_batches} accumulated"
        rank_zero_info(f"global batch {self.batch_size} = {division}")

    def _count_micro_batches(self, sampler: StepSampler) -> None:
        """Convert the trainer's limit of an epoch and interval of validation from steps to micro-batches."""
        steps = sampler.batches
        for name in ("limit_train_batches", "val_check_interval"):
            value = getattr(self.trainer, name, None)  # an interval in time has another name
            self._in_steps[name] = value
            if isinstance(value, float) and 0 < value < 1:
                value = max(1, int(value * steps))
            if isinstance(value, int):
                steps = min(value, steps)
                setattr(self.trainer, name, value * sampler.micro_batches)

    def _sampler(self, images: ImageSet, batch_size: int, **order: Any) -> StepSampler:
        rank, ranks = 0, 1
        if self.trainer:
            rank, ranks = self.trainer.global_rank, self.trainer.world_size
        return StepSampler(len(images), batch_size, self.seed, rank, ranks, **order)

    def _train_sampler(self) -> StepSampler:
        return self._sampler(self.train, self.batch_size, shuffle=True, limit=self.device_batch_size)

    def augmentation(self) -> Augmentation | None:
        """Return the function that reads the images of a training batch and changes them at random; None for none."""
        if not self.flip:
            return None
        return partial(mirror_half, self.seed)

    def _loader(self, images: ImageSet, sampler: StepSampler, augment: Augmentation | None = None) -> StepLoader:
        device = torch.device("cpu")
        if self.trainer:
            device = self.trainer.strategy.root_device
        if device.type != "cpu" and isinstance(images, InMemory) and images.images.nbytes <= ON_DEVICE:
            return StepLoader(images.to(device), sampler, augment)
        workers = min(self.num_workers, os.cpu_count() or 1)
        return StepLoader(images, sampler, augment, workers, pin_memory=device.type == "cuda")

    def count_train_batches(self) -> int:
        """Return the number of micro-batches of each process in a pass over the training images."""
        return len(self._train_sampler())

    def train_dataloader(self) -> StepLoader:
        sampler = self._train_sampler()
        limit = self.trainer.limit_train_batches if self.trainer else None
        if isinstance(limit, int):  # in micro-batches; a float is a share of all of them
            sampler.steps = min(max(1, limit // sampler.micro_batches), sampler.batches)
        return self._loader(self.train, sampler, self.augmentation())

    def val_dataloader(self) -> StepLoader | list[StepLoader]:
        """Return a loader of the test set in order, or [] without a test set.

        A last part of the set that is smaller than a global batch is left out. With `whole_test`, images of the
        beginning complete it, and their sample ids are beyond the set.
        """
        if self.test is None:
            return []
        ranks = self.trainer.world_size if self.trainer else 1
        count = len(self.test)
        most = -(-count // ranks) if self.whole_test else count // ranks
        share = min(self.batch_size // ranks, most, self.device_batch_size or self.batch_size)
        sampler = self._sampler(self.test, share * ranks, shuffle=False, fill=self.whole_test)
        return self._loader(self.test, sampler)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch._replace(images=self.network_input(batch.images))
