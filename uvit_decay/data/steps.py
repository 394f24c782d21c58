"""Batches as a function of (seed, step): shuffling, sharding over ranks and exact resumption in one place.

Global batch k holds the k-th slice of the concatenated epoch permutations; rank r of R takes its r-th part. So the
training data do not depend on the number of devices, and a run resumed in the middle of an epoch goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from uvit_decay.errors import UserError
from uvit_decay.randomness import generator


class ImageSet(Protocol):
    """Pictures of one size, read by lists of indices: uint8 (b, c, h, w) and int64 labels (b,)."""

    labels: Tensor

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]: ...


class Batch(NamedTuple):
    """A rank's part of global batch `number`: positions first, first + 1, ... of `total`."""

    images: Tensor
    labels: Tensor
    number: int
    first: int
    total: int


def subset(images: ImageSet, limit: int, name: str) -> list[int]:
    """All indices, or a fixed random `limit` of them: folders are sorted by class, so the first are of few classes."""
    if len(images) <= limit:
        return list(range(len(images)))
    return torch.randperm(len(images), generator=generator("subset", name))[:limit].sort().values.tolist()


class _Slice(NamedTuple):
    indices: list[int]
    number: int
    first: int
    total: int


class StepSampler(DistributedSampler):
    """Yields this rank's slice of every global batch from number `start` to the end of its epoch.

    It is a DistributedSampler only so that Lightning sees that sharding is taken care of.

    Raises:
        UserError: the global batch does not divide over the ranks, or is larger than the set.
    """

    def __init__(self, size: int, batch_size: int, seed: int, rank: int, ranks: int, shuffle: bool) -> None:
        super().__init__(range(size), num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed)
        if batch_size < 1:
            raise UserError(f"{size} pictures in batches of {batch_size} leave nothing for {ranks} devices")
        if batch_size % ranks:
            raise UserError(f"the global batch size {batch_size} is not divisible by {ranks} devices")
        if batch_size > size:
            raise UserError(f"the global batch size {batch_size} is larger than the {size} pictures of the set")
        self.size, self.batch_size, self.start = size, batch_size, 0

    def __len__(self) -> int:
        return self.size // self.batch_size

    def __iter__(self) -> Iterator[_Slice]:
        epoch, position = divmod(self.start, len(self))
        order = torch.arange(self.size)
        if self.shuffle:
            order = torch.randperm(self.size, generator=generator("order", self.seed, epoch))
        share = self.batch_size // self.num_replicas
        first = self.rank * share
        for k in range(position, len(self)):
            begin = k * self.batch_size + first
            yield _Slice(order[begin : begin + share].tolist(), epoch * len(self) + k, first, self.batch_size)


class _Batches(Dataset):
    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __getitem__(self, part: _Slice) -> Batch:
        return Batch(*self.images[part.indices], part.number, part.first, part.total)


class StepLoader(DataLoader):
    """A DataLoader over whole batches that Lightning saves and restores: it counts what it has handed out.

    Args:
        images: the pictures.
        sampler: which of them, and when.
        num_workers: processes that read; 0 for sets in memory.
        pin_memory: put batches where a GPU can fetch them.
    """

    def __init__(self, images: ImageSet, sampler: StepSampler, num_workers: int = 0, pin_memory: bool = False) -> None:
        super().__init__(
            _Batches(images),
            sampler=sampler,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if self.sampler.shuffle:  # an evaluation loader starts anew each time
                self.sampler.start = batch.number + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.sampler.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.start = state["start"]
