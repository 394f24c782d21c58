"""Shards: safetensors files of moments and labels, written whole, memory-mapped, read row by row.

A shard holds `moments` (n, 2, 2c, h, w), mean and log-variance of each picture [i, 0] and of its mirror [i, 1],
`labels` int64 (n,), and the sums over its pictures as JSON in its header. labels.safetensors has the labels of all
shards, so that nothing else of them is read before it is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from uvit_decay.data.latents.manifest import Manifest
from uvit_decay.data.steps import ImageSet
from uvit_decay.disk import replacing
from uvit_decay.errors import UserError, one_line

SUMS = "sums"
LABELS = "labels.safetensors"


def write_shard(path: Path, moments: Tensor, labels: Tensor, sums: dict[str, Any]) -> None:
    """The whole shard, or nothing if the process is killed meanwhile."""
    with replacing(path) as file:
        file.write(save({"labels": labels, "moments": moments}, {SUMS: json.dumps(sums)}))


def write_labels(folder: Path, labels: Tensor) -> None:
    """The labels (n,) of all shards, in order."""
    with replacing(folder / LABELS) as file:
        file.write(save({"labels": labels}))


def read_summaries(folder: Path, manifest: Manifest) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Labels and sums of each shard, in order.

    Raises:
        UserError: a shard cannot be read.
    """
    for name, _ in manifest.shards:
        with _opened(folder / name) as file:
            yield file.get_tensor("labels"), json.loads(file.metadata()[SUMS])


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is missing, cut short or not of this layout ({one_line(error)}): delete it and run the encode "
            "command again"
        ) from error


class LatentSet(ImageSet):
    """The moments in a folder of latents: stored dtype, (b, 2c, h, w), and int64 labels. Only what is read is loaded.

    Raises:
        UserError: a file is missing, cut short, or not what the manifest says.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.shards, self.shard_size = folder, manifest.shards, manifest.shard_size
        self.row = (2, 2 * manifest.latents.channels, manifest.size, manifest.size)
        with _opened(folder / LABELS) as file:
            self.labels = file.get_tensor("labels").clone()  # else it would stay a map of the file
        if len(self.labels) != manifest.count:
            raise UserError(f"{folder / LABELS} has {len(self.labels)} labels, the manifest {manifest.count} pictures")
        for name, part in self.shards:
            path = folder / name
            if not path.is_file() or path.stat().st_size < 2 * len(part) * math.prod(self.row):  # 2 bytes each
                raise UserError(f"{path} is missing or cut short: delete it and run the encode command again")
        self._open: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a memory map cannot be sent to a worker process, its name can

    def _shard(self, number: int) -> Tensor:
        """The moments of a shard, memory-mapped."""
        if number not in self._open:
            name, part = self.shards[number]
            with _opened(self.folder / name) as file:
                moments = file.get_tensor("moments")
            if moments.shape != (len(part), *self.row):
                raise UserError(
                    f"{self.folder / name} holds {tuple(moments.shape)}, the manifest says {(len(part), *self.row)}"
                )
            self._open[number] = moments
        return self._open[number]

    def _rows(self, indices: list[int], sides: list[int]) -> Tensor:
        places = (divmod(i, self.shard_size) for i in indices)
        return torch.stack([self._shard(k)[row, side] for (k, row), side in zip(places, sides, strict=True)])

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self._rows(indices, [0] * len(indices)), self.labels[indices]

    def mirrored(self, indices: list[int], mirror: Tensor) -> tuple[Tensor, Tensor]:
        """The moments of the mirrored pictures where `mirror` says so; flipped latents decode to something else."""
        return self._rows(indices, mirror.long().tolist()), self.labels[indices]
