"""Random numbers as functions of names and numbers: results do not depend on batch sizes, devices or resumption.

`generator("noise", seed, step)` is always the same stream. Within one global batch, `BatchRandom` gives each rank the
numbers of its own positions: the batch is cut into at most 16 shards with a stream each, and a rank draws the shards
that it overlaps. So one process and many draw the same numbers on the same kind of device.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor

SHARDS = 16


def generator(*key: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch.Generator that is a function of `key` (names and non-negative integers) and of the kind of device."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
    words.insert(0, len(key))  # SeedSequence does not tell trailing zeros from nothing
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(seed)


class BatchRandom:
    """Random numbers for positions [first, first + count) of a global batch of `total` samples.

    Successive draws continue each shard's stream, so all ranks must draw the same things in the same order.
    """

    def __init__(self, *key: str | int, first: int, count: int, total: int, device: torch.device | str = "cpu") -> None:
        self.size = total // math.gcd(total, SHARDS)
        self.shards = range(first // self.size, math.ceil((first + count) / self.size))
        self.cut = slice(first - self.shards.start * self.size, first - self.shards.start * self.size + count)
        self.device = device
        self.generators = [generator(*key, shard, device=device) for shard in self.shards]

    def uniform(self, *shape: int) -> Tensor:
        """Float32 (count, *shape), uniform in [0, 1)."""
        draws = [torch.rand(self.size, *shape, generator=g, device=self.device) for g in self.generators]
        return torch.cat(draws)[self.cut]

    def normal(self, *shape: int) -> Tensor:
        """Float32 (count, *shape), standard normal."""
        draws = [torch.randn(self.size, *shape, generator=g, device=self.device) for g in self.generators]
        return torch.cat(draws)[self.cut]
