"""Batches as a function of (seed, step): shuffling, mirroring, sharding over ranks and exact resumption in one place.

Global batch k is the k-th slice of the concatenated epoch permutations; rank r of R takes its r-th share, in one
micro-batch or, if that is too large for a device, in several whose gradients are accumulated. The training data
do not depend on the number of devices, and a run resumed in the middle of an epoch continues with the next batch.
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
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import generator, uniform


class ImageSet(ABC):
    """Images of one size in their stored form, read by lists of indices: uint8 (b, c, h, w) and int64 labels (b,).

    `labels` (n,) are those of all images, on the CPU; `crop` gives images of other sizes theirs when they are read.
    """

    labels: Tensor
    crop: Crop | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]: ...

    def stored(self, indices: list[int]) -> Tensor:
        """Return the images of `self[indices]`."""
        return self[indices][0]

    def content_hash(self) -> str:
        """Return the SHA-256 of 64 stored images, spread evenly; sets that know their files or bytes hash all."""
        return hash_array(self.stored(spread(len(self), SPREAD_IMAGES)))

    def mirrored(self, indices: list[int], mirror: Tensor) -> tuple[Tensor, Tensor]:
        """Return `self[indices]` with images mirrored (left to right) where the bool tensor `mirror` (b,) is True."""
        images, labels = self[indices]
        mirror = mirror.to(images.device, non_blocking=True)[:, None, None, None]
        return torch.where(mirror, images.flip(-1), images), labels


class InMemory(ImageSet):
    """An ImageSet in memory: uint8 images (n, c, h, w), on any device, and int64 labels (n,) on the CPU."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices, dtype=torch.int64)  # the dtype is needed for an empty list
        return self.images[chosen.to(self.images.device, non_blocking=True)], self.labels[chosen]

    def content_hash(self) -> str:
        """Return the SHA-256 of all images."""
        return hash_array(self.images)

    def to(self, device: torch.device) -> InMemory:
        """Return this set with its images on `device`."""
        moved = copy.copy(self)
        moved.images = self.images.to(device)
        return moved


# Of a set, indices and rows, see `Batch.sample_ids`.
Augmentation = Callable[[ImageSet, list[int], Tensor], tuple[Tensor, Tensor]]


def half_mirrored(seed: int, images: ImageSet, indices: list[int], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return images of a set, half of them mirrored: an Augmentation of which `seed` is given."""
    return images.mirrored(indices, uniform("flip", seed, rows=rows) < 0.5)


class Batch(NamedTuple):
    """A micro-batch of global batch `number`: positions first, first + 1, ... of `total`.

    `images` have their stored form (see ImageSet) until the data module moves them to the network's device and converts
    them to its input: float32 (b, c, h, w), about [-1, 1].
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
        """Return `sample_ids` on a device: those on the CPU can be read without waiting for another one."""
        return _rows(self.number, self.first, self.total, len(self.images), device)


def _rows(number: int, first: int, total: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    start = number * total + first
    return torch.arange(start, start + count, device=device)


Slice = tuple[list[int], int, int, int]  # indices of images, and number, first and total of their Batch


def micro_batches(share: int, limit: int | None) -> int:
    """Return the least number of equal micro-batches of a device's `share` of a batch, none above `limit`."""
    return next(count for count in range(1, share + 1) if share % count == 0 and share // count <= (limit or share))


class StepSampler(DistributedSampler):
    """A sampler of this rank's share of every global batch, from `start` to the end of its epoch, by micro-batches.

    It subclasses DistributedSampler only so that Lightning does not replace it by another one.

    Args:
        size: number of images in the set.
        batch_size: the global batch size.
        seed: random seed of the order.
        rank: index of this process.
        ranks: number of processes.
        shuffle: a new order in each epoch; otherwise always the order of the set.
        limit: most images per micro-batch; None takes the whole share at once.
        fill: fill the last batch of an epoch with images of its beginning; otherwise a last part of one is left out.
            Without shuffling, the rows of what fills it are `size` or more.
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
            raise UserError(f"{size} images in batches of {batch_size} leave nothing for {ranks} devices")
        if batch_size % ranks:
            raise UserError(f"the global batch size {batch_size} is not divisible by {ranks} devices")
        if batch_size > size and not fill:
            raise UserError(f"the global batch size {batch_size} is larger than the {size} images of the set")
        self.size, self.batch_size, self.start = size, batch_size, 0
        self.share = batch_size // ranks
        self.micro_batches = micro_batches(self.share, limit)
        self.batches = -(-size // batch_size) if fill else size // batch_size  # in an epoch
        self.steps = self.batches  # global batches after which an iteration ends; fewer where training limits an epoch

    def __len__(self) -> int:
        return self.batches * self.micro_batches

    def __iter__(self) -> Iterator[Slice]:
        step = self.share // self.micro_batches
        end = (self.start // self.steps + 1) * self.steps
        shown, order = -1, torch.arange(self.size)  # the epoch whose order this is
        for number in range(self.start, end):
            epoch, position = divmod(number, self.batches)
            if self.shuffle and epoch != shown:
                shown, order = epoch, torch.randperm(self.size, generator=generator("order", self.seed, epoch))
            for first in range(self.rank * self.share, (self.rank + 1) * self.share, step):
                begin = position * self.batch_size + first
                indices = order[torch.arange(begin, begin + step) % self.size].tolist()
                yield indices, number, first, self.batch_size


class _Batches(Dataset):
    def __init__(self, images: ImageSet, augment: Augmentation | None) -> None:
        self.images, self.augment = images, augment

    def __getitem__(self, part: Slice) -> Batch:
        indices, number, first, total = part
        if self.augment is None:
            return Batch(*self.images[indices], number, first, total)
        rows = _rows(number, first, total, len(indices))
        return Batch(*self.augment(self.images, indices, rows), number, first, total)


class StepLoader(DataLoader):
    """A DataLoader of whole batches that counts those it yields, so that Lightning can save and restore its position.

    Args:
        images: the set.
        sampler: the order and division of the batches.
        augment: reads the images of a batch and changes them at random; None takes them as they are.
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
