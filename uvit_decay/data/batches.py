"""Batches as a function of (seed, step): shuffling, mirroring, sharding over ranks and exact resumption in one place.

Global batch k is the k-th slice of the concatenated epoch permutations. Rank r of R takes its r-th share, in one
micro-batch or, if the share is too large for a device, in several micro-batches whose gradients are accumulated. The
training data does not depend on the number of devices, and a run resumed in the middle of an epoch continues with the
next batch.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from uvit_decay.data.decoding import Crop
from uvit_decay.data.fingerprint import SPREAD_IMAGES, hash_array, spread
from uvit_decay.runtime.random import generator, uniform
from uvit_decay.terminal.errors import UserError


class ImageSet(ABC):
    """Images of one size in their stored form, read by lists of indices: uint8 (b, c, h, w) and int64 labels (b,).

    `labels` (n,) has the labels of all images, on the CPU. `crop` scales and crops images when they are read.
    `has_jpegs` is true if images come from JPEGs, whose artefacts change metrics.
    """

    labels: Tensor
    crop: Crop | None = None
    has_jpegs = False

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]: ...

    def stored(self, indices: list[int]) -> Tensor:
        """Return the images of `self[indices]`."""
        return self[indices][0]

    def content_hash(self) -> str:
        """Return the SHA-256 of 64 stored images, spread evenly; subclasses with files or bytes hash all images."""
        chosen = spread(len(self), SPREAD_IMAGES)
        return hash_array(self.stored(chosen))

    def mirrored(self, indices: list[int], mirror: Tensor) -> tuple[Tensor, Tensor]:
        """Return `self[indices]` with images mirrored (left to right) where the bool tensor `mirror` (b,) is True."""
        images, labels = self[indices]
        mirror = mirror.to(images.device, non_blocking=True)[:, None, None, None]
        return torch.where(mirror, images.flip(-1), images), labels


class InMemory(ImageSet):
    """An ImageSet in memory: uint8 images (n, c, h, w), on any device, and int64 labels (n,) on the CPU."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices, dtype=torch.int64)  # the dtype is needed for an empty list
        there = chosen.to(self.images.device, non_blocking=True)
        return self.images[there], self.labels[chosen]

    def content_hash(self) -> str:
        """Return the SHA-256 of all images."""
        return hash_array(self.images)

    def to(self, device: torch.device) -> InMemory:
        """Return this set with its images on `device`."""
        moved = copy.copy(self)
        moved.images = self.images.to(device)
        return moved


# Reads the images of a set at some indices and changes them at random; its third argument is `Batch.sample_ids`.
Augmentation = Callable[[ImageSet, list[int], Tensor], tuple[Tensor, Tensor]]


def mirror_half(seed: int, images: ImageSet, indices: list[int], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return images of a set, half of them mirrored: an Augmentation once `seed` is given."""
    mirror = uniform("flip", seed, rows=rows) < 0.5
    return images.mirrored(indices, mirror)


class Batch(NamedTuple):
    """A micro-batch of global batch `number`: positions first, first + 1, ... of `total`.

    `images` have their stored form (see ImageSet) until the data module moves them to the network's device and converts
    them to the network's input: float32 (b, c, h, w), about [-1, 1].
    """

    images: Tensor
    labels: Tensor
    number: int
    first: int
    total: int

    @property
    def sample_ids(self) -> Tensor:
        """Positions of the images in the whole run, which key their random numbers: int64 (b,) on their device."""
        return self.sample_ids_on(self.images.device)

    def sample_ids_on(self, device: torch.device | str) -> Tensor:
        """Return `sample_ids` on a device; on the CPU they can be read without waiting for another device."""
        return _rows(self.number, self.first, self.total, len(self.images), device)


def _rows(number: int, first: int, total: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    start = number * total + first
    return torch.arange(start, start + count, device=device)


Slice = tuple[list[int], int, int, int]  # indices of images, and number, first and total of their Batch


def micro_batches(share: int, limit: int | None) -> int:
    """Return the smallest number of equal micro-batches of a device's `share`, each of at most `limit` images."""
    most = limit or share
    count = 1
    while share % count or share // count > most:
        count += 1
    return count


class StepSampler(DistributedSampler):
    """A sampler of this rank's share of every global batch, from `start` to the end of its epoch, by micro-batches.

    It subclasses DistributedSampler only so that Lightning does not replace it by a sampler of its own.

    Args:
        size: number of images in the set.
        batch_size: the global batch size.
        seed: random seed of the order.
        rank: index of this process.
        ranks: number of processes.
        shuffle: a new order in each epoch; otherwise always the order of the set.
        limit: most images per micro-batch; None takes the whole share at once.
        fill: fill an incomplete last batch of an epoch with images of its beginning; otherwise it is left out. Without
            shuffling, padding images have sample ids >= `size`.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        rank: int,
        ranks: int,
        shuffle: bool,
        limit: int | None = None,
        fill: bool = False,
    ) -> None:
        super().__init__(range(size), num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed)
        if batch_size < 1:
            raise UserError(f"a global batch of {batch_size} of {size} images is too small for {ranks} devices")
        if batch_size % ranks:
            raise UserError(f"{batch_size} is not divisible by {ranks} devices", argument="batch_size")
        if batch_size > size and not fill:
            raise UserError(
                f"{batch_size} is larger than the {size} images of the set; lower it", argument="batch_size"
            )
        self.size = size
        self.batch_size = batch_size
        self.start = 0
        self.share = batch_size // ranks
        self.micro_batches = micro_batches(self.share, limit)
        self.batches = size // batch_size  # in an epoch
        if fill:
            self.batches = -(-size // batch_size)
        self.steps = self.batches  # global batches after which an iteration ends; fewer if training limits an epoch

    def __len__(self) -> int:
        return self.batches * self.micro_batches

    def __iter__(self) -> Iterator[Slice]:
        # 1. A global batch is divided into contiguous shares of the ranks, and a share into micro-batches. Its images
        #    do not depend on the number of either, so that a run may resume with other numbers.
        step = self.share // self.micro_batches
        start_of_share = self.rank * self.share
        # 2. `start` counts the global batches of the whole run. A resumed run may start within an iteration, and then
        #    does only the rest of it.
        end = (self.start // self.steps + 1) * self.steps
        order = torch.arange(self.size)
        shuffled = -1  # the epoch of `order`
        for number in range(self.start, end):
            # 3. The epoch of the data, by `batches`, is not an iteration, by `steps`, if training limits its epochs:
            #    an order is then used up over several iterations.
            epoch, position = divmod(number, self.batches)
            if self.shuffle and epoch != shuffled:
                order = torch.randperm(self.size, generator=generator("order", self.seed, epoch))
                shuffled = epoch
            for first in range(start_of_share, start_of_share + self.share, step):
                begin = position * self.batch_size + first
                places = torch.arange(begin, begin + step) % self.size  # `fill` wraps to the beginning of the order
                yield order[places].tolist(), number, first, self.batch_size


class _Batches(Dataset):
    def __init__(self, images: ImageSet, augment: Augmentation | None) -> None:
        self.images = images
        self.augment = augment

    def __getitem__(self, part: Slice) -> Batch:
        indices, number, first, total = part
        if self.augment is None:
            images, labels = self.images[indices]
        else:
            rows = _rows(number, first, total, len(indices))
            images, labels = self.augment(self.images, indices, rows)
        return Batch(images, labels, number, first, total)


class StepLoader(DataLoader):
    """A DataLoader that counts its batches, so that Lightning can save and restore its position.

    Args:
        images: the set.
        sampler: the order and division of the batches.
        augment: function that reads the images of a batch and changes them at random; None reads them unchanged.
        num_workers: reader processes; 0 for sets in memory.
        pin_memory: put batches into pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        images: ImageSet,
        sampler: StepSampler,
        augment: Augmentation | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            _Batches(images, augment),
            sampler=sampler,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        start = self.sampler.start
        for count, batch in enumerate(super().__iter__(), 1):
            if self.sampler.shuffle:  # an evaluation loader always begins at batch 0
                self.sampler.start = start + count // self.sampler.micro_batches
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next global batch; Lightning stores it in checkpoints."""
        return {"start": self.sampler.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the global batch of a `state_dict`."""
        self.sampler.start = state["start"]
