"""Shards: safetensors files of moments and labels, written atomically, memory-mapped and read row by row.

A shard contains these tensors:
- `moments` (n, 2, 2c, h, w): mean and log-variance of each image [i, 0] and of its mirror image [i, 1];
- `labels`, int64 (n,);
- `rows`, int64 (n, 2): CRC-32s of the bytes of the moments;
- `pixels`, int64 (n,): CRC-32s of the encoded images, if they are known.

Its header contains the sums over its images as JSON, its number and the fingerprint of its manifest.
labels.safetensors contains the labels of all shards, so that shards are read only when needed.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from uvit_decay.data.batches import ImageSet
from uvit_decay.files.tensor_files import load_tensors, save_tensors
from uvit_decay.latents.manifest import Manifest, Sums
from uvit_decay.terminal.errors import UserError

SUMS = "sums"  # names in the header
OWNER = "whose"
LABELS = "labels.safetensors"


@dataclass
class Shard:
    """Contents of a shard to be written; see the module for the shapes."""

    moments: Tensor
    labels: Tensor
    pixels: Tensor | None
    sums: Sums


def write_shard(folder: Path, manifest: Manifest, number: int, shard: Shard) -> None:
    """Write a shard atomically: a process that is killed leaves either the whole file or no file."""
    tensors = {"moments": shard.moments, "labels": shard.labels, "rows": crc32(shard.moments, 2)}
    if shard.pixels is not None:
        tensors["pixels"] = shard.pixels
    metadata = {SUMS: shard.sums.to_json(), OWNER: _owner(manifest, number)}
    save_tensors(folder / manifest.shards[number].name, tensors, metadata)


def write_labels(folder: Path, labels: Tensor) -> None:
    """Write the labels (n,) of all shards, in order."""
    save_tensors(folder / LABELS, {"labels": labels})


def crc32(values: Tensor, dims: int) -> Tensor:
    """Return the CRC-32 of the bytes at each index of the first `dims` dimensions, int64."""
    bytes_at = values.contiguous().view(torch.uint8).flatten(dims)
    rows = bytes_at.flatten(0, dims - 1).numpy()
    checksums = [zlib.crc32(row) for row in rows]
    return torch.tensor(checksums, dtype=torch.int64).view(values.shape[:dims])


def _owner(manifest: Manifest, number: int) -> str:
    return f"{number} of {manifest.fingerprint}"


def _open(
    folder: Path, manifest: Manifest, number: int, verify: bool = False
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and memory-mapped tensors of a shard; `verify` reads all of it to compare its checksums."""
    path = folder / manifest.shards[number].name
    metadata, tensors = load_tensors(path, verify)
    owner = _owner(manifest, number)
    if metadata.get(OWNER) != owner:
        raise UserError(
            f"{path} is a shard of other latents, or another shard of these latents: copy the folder again, or encode "
            "the images into a new folder"
        )
    return metadata, tensors


def check_shard(folder: Path, manifest: Manifest, number: int, labels: Tensor) -> Tensor | None:
    """Verify a whole shard; return the checksums (n,) of its images' pixels, or None if it has none."""
    _, tensors = _open(folder, manifest, number, verify=True)
    if not torch.equal(tensors["labels"], labels):
        raise UserError(f"{folder / manifest.shards[number].name} has labels of other images")
    return tensors.get("pixels")


def check_space(folder: Path, manifest: Manifest, shards: int) -> None:
    """Raise a UserError if the disk has no space for this number of further shards."""
    needed = shards * min(manifest.shard_size, manifest.count) * manifest.row_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: the latents need {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of the disk are free"
        )


def read_sums(folder: Path, manifest: Manifest) -> Iterator[Sums]:
    """Yield the sums of each shard in order; raise a UserError if a shard cannot be read."""
    for number in range(len(manifest.shards)):
        metadata, _ = _open(folder, manifest, number)
        yield Sums.from_json(metadata[SUMS], manifest.latents)


class _MappedShard(NamedTuple):
    """Moments of a shard as memory-mapped bytes (n, 2, bytes of a row), and their checksums (n, 2)."""

    moments: np.ndarray
    checksums: np.ndarray


class LatentSet(ImageSet):
    """The moments in a folder of latents: stored dtype, (b, 2c, h, w), and int64 labels (b,); read on demand.

    Args:
        folder: the folder of latents.
        manifest: the manifest of the folder.
        verify: compare each row that is read with its checksum.
    """

    def __init__(self, folder: Path, manifest: Manifest, verify: bool = True) -> None:
        self.folder, self.manifest, self.verify = folder, manifest, verify
        _, tensors = load_tensors(folder / LABELS)
        self.labels = tensors["labels"].clone()  # a copy, not a memory map of the file
        for shard in manifest.shards:
            path = folder / shard.name
            if not path.is_file() or path.stat().st_size < len(shard.images) * manifest.row_bytes:
                raise UserError(f"{path} is missing or truncated; run the same encode command again")
        self._shards: dict[int, _MappedShard] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}  # not pickled: worker processes map the files again

    def _shard(self, number: int) -> _MappedShard:
        """Return a shard, which is opened when it is needed for the first time."""
        if number not in self._shards:
            _, tensors = _open(self.folder, self.manifest, number)
            name, images = self.manifest.shards[number]
            if not torch.equal(tensors["labels"], self.labels[images.start : images.stop]):
                raise UserError(f"{self.folder / name} and {LABELS} disagree on the labels; encode the images again")
            moments = tensors["moments"].view(torch.uint8).flatten(2)
            self._shards[number] = _MappedShard(moments.numpy(), tensors["rows"].numpy())
        return self._shards[number]

    def _rows(self, indices: list[int], sides: list[int]) -> Tensor:
        """Return the moments of these images, of the image itself (side 0) or its mirror image (side 1)."""
        shape = self.manifest.row[1:]
        rows = np.empty((len(indices), self.manifest.row_bytes // self.manifest.row[0]), np.uint8)
        for row, index, side in zip(rows, indices, sides, strict=True):
            number, i = divmod(index, self.manifest.shard_size)
            shard = self._shard(number)
            row[:] = shard.moments[i, side]
            if self.verify and zlib.crc32(row) != shard.checksums[i, side]:
                path = self.folder / self.manifest.shards[number].name
                raise UserError(f"{path} is damaged in row {i}; run the same encode command again")
        dtype = getattr(torch, self.manifest.dtype)
        return torch.from_numpy(rows).view(dtype).unflatten(1, shape)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        originals = [0] * len(indices)
        return self._rows(indices, originals), self.labels[indices]

    def content_hash(self) -> str:
        """Return the SHA-256 of the manifest's settings, image names and statistics; the folder does not count."""
        return self.manifest.content_hash

    def mirrored(self, indices: list[int], mirror: Tensor) -> tuple[Tensor, Tensor]:
        """Return the moments of the mirror image where `mirror` is True; flipped latents decode to other images."""
        return self._rows(indices, mirror.long().tolist()), self.labels[indices]
