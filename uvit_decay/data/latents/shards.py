"""Shards: safetensors files of moments and labels, written atomically, memory-mapped and read row by row.

A shard holds `moments` (n, 2, 2c, h, w), mean and log-variance of each image [i, 0] and of its mirror image [i, 1];
`labels` int64 (n,); int64 CRC-32s: `rows` (n, 2) of the bytes of the moments, `pixels` (n,) of the encoded images; and,
in its header, the sums over its images as JSON, its number and the fingerprint of its manifest. labels.safetensors
holds the labels of all shards, so that shards are read only when needed. Shards without checksums are accepted.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uvit_decay.data.batches import ImageSet
from uvit_decay.data.latents.manifest import Manifest, Sums
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.tensor_files import load_tensors, save_tensors

SUMS, OWNER = "sums", "whose"  # names in the header
LABELS = "labels.safetensors"


def write_shard(
    folder: Path, manifest: Manifest, number: int, moments: Tensor, labels: Tensor, pixels: Tensor, sums: Sums
) -> None:
    """Write a shard atomically: a process that is killed leaves either the whole file or none."""
    tensors = {"moments": moments, "labels": labels, "pixels": pixels, "rows": crc32(moments, 2)}
    metadata = {SUMS: sums.to_json(), OWNER: _owner(manifest, number)}
    save_tensors(folder / manifest.shards[number][0], tensors, metadata)


def write_labels(folder: Path, labels: Tensor) -> None:
    """Write the labels (n,) of all shards, in order."""
    save_tensors(folder / LABELS, {"labels": labels})


def crc32(values: Tensor, dims: int) -> Tensor:
    """Return the CRC-32 of the bytes at each index of the first `dims` dimensions, int64."""
    rows = values.contiguous().view(torch.uint8).flatten(dims).flatten(0, dims - 1).numpy()
    return torch.tensor([zlib.crc32(row) for row in rows], dtype=torch.int64).view(values.shape[:dims])


def _owner(manifest: Manifest, number: int) -> str:
    return f"{number} of {manifest.fingerprint}"


def _open(
    folder: Path, manifest: Manifest, number: int, verify: bool = False
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and memory-mapped tensors of a shard; `verify` reads all of it to compare its checksums."""
    name, part = manifest.shards[number]
    metadata, tensors = load_tensors(folder / name, verify)
    if metadata.get(OWNER, _owner(manifest, number)) != _owner(manifest, number):
        raise UserError(f"{folder / name} is a shard of other latents, or from another place among these")
    count = len(part)
    expected = {
        "moments": (getattr(torch, manifest.dtype), (count, *manifest.row)),
        "labels": (torch.int64, (count,)),
        "pixels": (torch.int64, (count,)),
        "rows": (torch.int64, (count, 2)),
    }
    for key in {"moments", "labels"} | tensors.keys():
        actual = (tensors[key].dtype, tuple(tensors[key].shape)) if key in tensors else None
        if actual != expected.get(key):
            raise UserError(f"{folder / name} holds {key} {actual}, the manifest says {expected.get(key)}")
    return metadata, tensors


def check_shard(folder: Path, manifest: Manifest, number: int, labels: Tensor) -> Tensor | None:
    """Verify a whole shard; return the checksums (n,) of its images' pixels, or None if it has none."""
    path = folder / manifest.shards[number][0]
    metadata, tensors = _open(folder, manifest, number, verify=True)
    if not torch.equal(tensors["labels"], labels):
        raise UserError(f"{path} has labels of other images")
    if not tensors["moments"].isfinite().all():
        raise UserError(f"{path} holds moments that are not finite")
    _sums(path, manifest, metadata)
    return tensors.get("pixels")


def read_sums(folder: Path, manifest: Manifest) -> Iterator[Sums]:
    """Yield the sums of each shard in order; raise a UserError if a shard cannot be read."""
    for number, (name, _) in enumerate(manifest.shards):
        yield _sums(folder / name, manifest, _open(folder, manifest, number)[0])


def _sums(path: Path, manifest: Manifest, metadata: dict[str, str]) -> Sums:
    errors = (KeyError, TypeError, ValueError, RuntimeError, RecursionError)
    with explained(f"{path} has no sums that can be read", *errors):
        return Sums.from_json(metadata[SUMS], manifest.latents)


class LatentSet(ImageSet):
    """The moments in a folder of latents: stored dtype, (b, 2c, h, w), and int64 labels (b,). Rows are read on demand.

    Args:
        folder: the folder of latents.
        manifest: the manifest of the folder.
        verify: compare each row that is read with its checksum.
    """

    def __init__(self, folder: Path, manifest: Manifest, verify: bool = True) -> None:
        self.folder, self.manifest, self.verify = folder, manifest, verify
        self.labels = self._labels()
        for name, part in manifest.shards:
            path = folder / name
            if not path.is_file() or path.stat().st_size < 2 * len(part) * math.prod(manifest.row):  # 2 bytes each
                raise UserError(f"{path} is missing or truncated: run the same encode command again")
        self._shards: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}  # not pickled: worker processes map the files again

    def _labels(self) -> Tensor:
        """Return all labels (count,); raise a UserError unless the count of each class is that of the manifest."""
        path, manifest = self.folder / LABELS, self.manifest
        labels = load_tensors(path)[1].get("labels", torch.empty(0))
        counts = list(manifest.classes.values()) or [manifest.count]
        whole = labels.dtype == torch.int64 and labels.shape == (manifest.count,)
        inside = whole and int(labels.min()) >= 0 and int(labels.max()) < len(counts)
        if not inside or labels.bincount(minlength=len(counts)).tolist() != counts:
            raise UserError(f"{path} has other labels than the manifest counts: run the same encode command again")
        return labels.clone()  # a copy, not a memory map of the file

    def _shard(self, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a shard's moments as memory-mapped bytes (n, 2, bytes of a row) and their checksums (n, 2) or None."""
        if number not in self._shards:
            _, tensors = _open(self.folder, self.manifest, number)
            name, part = self.manifest.shards[number]
            if not torch.equal(tensors["labels"], self.labels[part.start : part.stop]):
                raise UserError(f"{self.folder / name} and {LABELS} disagree on the labels")
            checksums = tensors["rows"].numpy() if self.verify and "rows" in tensors else None
            self._shards[number] = tensors["moments"].view(torch.uint8).flatten(2).numpy(), checksums
        return self._shards[number]

    def _rows(self, indices: list[int], sides: list[int]) -> Tensor:
        """Return the moments of these images, of the image itself (side 0) or its mirror image (side 1)."""
        rows = np.empty((len(indices), 2 * math.prod(self.manifest.row[1:])), np.uint8)
        for row, index, side in zip(rows, indices, sides, strict=True):
            number, i = divmod(index, self.manifest.shard_size)
            moments, checksums = self._shard(number)
            row[:] = moments[i, side]
            if checksums is not None and zlib.crc32(row) != checksums[i, side]:
                name = self.manifest.shards[number][0]
                raise UserError(f"{self.folder / name} is damaged in row {i}: run the same encode command again")
        return torch.from_numpy(rows).view(getattr(torch, self.manifest.dtype)).unflatten(1, self.manifest.row[1:])

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self._rows(indices, [0] * len(indices)), self.labels[indices]

    def content_hash(self) -> str:
        """Return the SHA-256 of the manifest's settings, image names and statistics, in any folder."""
        return self.manifest.content_hash

    def mirrored(self, indices: list[int], mirror: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mirror images' moments where `mirror` is True; flipped latents would decode to other images."""
        return self._rows(indices, mirror.long().tolist()), self.labels[indices]
