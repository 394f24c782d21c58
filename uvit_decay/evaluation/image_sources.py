"""Image sources for evaluation, read by index: a folder, zip or tar, an array, a data set."""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import repeat
from torch import Tensor

from uvit_decay.data.batches import ImageSet, InMemory
from uvit_decay.data.decoding import centre_crop
from uvit_decay.data.folder import OnDisk
from uvit_decay.data.image_files import Listing, list_images, read, size_of
from uvit_decay.evaluation import npz
from uvit_decay.runtime.distributed import COMPARED
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.random import subset
from uvit_decay.samples import PATHS, Samples

LOSSY = (".jpg", ".jpeg")
MOST_CLASSES = 100_000  # upper limit for the labels of an array


class ImageSource(ABC):
    """A sequence of uint8 images of one `shape` (c, h, w).

    `name` identifies them in keys and reports. `labels`, int64 (n,) on the CPU, index `class_names`, or are None.
    `has_jpegs` is true of JPEGs, whose artefacts affect every metric. `prefetch` permits a thread to read the
    next part while features of the last one are extracted.
    """

    name: str
    shape: tuple[int, int, int]
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()
    has_jpegs = False
    prefetch = True
    nfe = 0  # network evaluations so far, counted per image, if a network generates the images

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: Sequence[int]) -> Tensor:
        """Return the images at `indices`, uint8 (b, c, h, w), on any device."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return a fingerprint, as plain values: features stored under it may be reused until it changes."""

    def content(self) -> list[Any]:
        """Return values that are the same on another node if the images are, at other paths or times, too."""
        few = self.read(subset(range(len(self)), COMPARED, "compared"))
        return [len(self), self.shape, zlib.crc32(few.cpu().contiguous().numpy())]

    def metadata(self) -> dict[str, Any]:
        """Return metadata for reports, as plain values."""
        return {"name": self.name, "n": len(self), "size": f"{self.shape[2]}x{self.shape[1]}"}


def as_channels(images: Tensor, channels: int) -> Tensor:
    """Return images with grey (b, 1, h, w) expanded to `channels`, contiguous: rounding depends on strides."""
    if images.shape[1] != channels:
        images = repeat(images, "n 1 h w -> n c h w", c=channels)
    return images.clone(memory_format=torch.contiguous_format)


class FileImages(ImageSource):
    """All images of a folder (at any depth), zip or tar, in the order of their names.

    Args:
        path: the folder or archive.
        channels: 1 reads images as grey, 3 as RGB.
        image_size: size that images are cropped to, as ADM does; with None they must be squares of one size.
    """

    def __init__(self, path: Path, channels: int, image_size: int | None) -> None:
        self.listing = list_images(path)
        self.exact = image_size is None
        side = image_size or size_of(self.listing)
        self.name, self.shape = path.resolve().stem, (channels, side, side)
        self.has_jpegs = any(name.lower().endswith(LOSSY) for name in self.listing.members)
        if self.listing.class_names:
            self.labels, self.class_names = torch.tensor(self.listing.labels), self.listing.class_names

    def __len__(self) -> int:
        return len(self.listing.members)

    def read(self, indices: Sequence[int]) -> Tensor:
        return read(self.listing, self.shape[1], self.shape[0], indices, exact=self.exact)

    def fingerprint(self) -> dict[str, Any]:
        return {"files": _files_hash(self.listing), "shape": list(self.shape)}


def _files_hash(listing: Listing) -> str:
    """Return the sha256 of names, sizes and modification times: reading all bytes could take as long as evaluation."""
    path = listing.path.resolve()
    digest = hashlib.sha256(repr((str(path), listing.members)).encode())
    with explained(f"{path} has changed", OSError):
        for name in listing.stored_in:
            stat = (path / name).stat()
            digest.update(repr((name, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()


def file_state(kind: str, path: Path) -> dict[str, Any]:
    """Return the path of a file under the key `kind`, its size and its time of change; a UserError if it is gone."""
    with explained(f"cannot read {path}", OSError):
        stat = path.stat()
    return {kind: str(path.resolve()), "size": stat.st_size, "time": stat.st_mtime_ns}


class ArrayImages(ImageSource):
    """Images of an .npz as ADM's suite and sample.py write it: `arr_0` uint8 (n, h, w, c), labels `arr_1` int64 (n,).

    The whole array is read into memory, after all of it has been compared with the zip's checksum.

    Args:
        path: the .npz file.
        channels: 3 converts grey images to RGB.
    """

    def __init__(self, path: Path, channels: int) -> None:
        self.path = path
        present = npz.names(path)
        if "arr_0" not in present:
            raise UserError(f"{path} has no arr_0: an .npz of images holds them there, uint8 (n, h, w, c)")

        def fits(shape: tuple[int, ...], dtype: np.dtype) -> bool:
            return dtype == np.uint8 and len(shape) == 4 and 0 not in shape and shape[3] in (1, channels)

        self.array = npz.read(path, "arr_0", f"uint8 (n, h, w, {channels})", fits)
        self.name, self.shape = path.stem, (channels, *self.array.shape[1:3])
        if "arr_1" not in present:
            return
        n, expected = len(self.array), f"labels, whole numbers from 0, ({len(self.array)},)"
        labels = npz.read(path, "arr_1", expected, lambda shape, dtype: shape == (n,) and dtype.kind in "iu")
        if labels.min() < 0 or labels.max() >= MOST_CLASSES:
            raise UserError(f"{path}: arr_1 must be {expected}, below {MOST_CLASSES}")
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.class_names = tuple(str(i) for i in range(int(labels.max()) + 1))

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: Sequence[int]) -> Tensor:
        return as_channels(torch.from_numpy(self.array[list(indices)]).permute(0, 3, 1, 2), self.shape[0])

    def fingerprint(self) -> dict[str, Any]:
        return file_state("array", self.path)


class DatasetImages(ImageSource):
    """Images of a data set.

    Args:
        name: name in keys and reports, such as cifar100-train.
        images: the data set.
        channels: 3 converts grey images to RGB.
        class_names: names of its labels; empty if it has none.
        chosen: indices of the images to use; None takes all.
    """

    def __init__(
        self, name: str, images: ImageSet, channels: int, class_names: tuple[str, ...], chosen: list[int] | None = None
    ) -> None:
        self.name, self.images, self.class_names = name, images, class_names
        self.chosen = list(range(len(images))) if chosen is None else chosen
        stored = images[self.chosen[:1]][0].shape[1:]
        if stored[0] not in (1, channels):
            raise UserError(f"{name} has {stored[0]} channels, these features are of {channels}")
        self.shape = (channels, *stored[1:])
        self.labels = images.labels[self.chosen] if class_names else None

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, indices: Sequence[int]) -> Tensor:
        return as_channels(self.images[[self.chosen[i] for i in indices]][0], self.shape[0])

    def fingerprint(self) -> dict[str, Any]:
        if isinstance(self.images, InMemory):
            content = hashlib.sha256(self.images.images.cpu().contiguous().numpy()).hexdigest()
            chosen = self.chosen
        elif isinstance(self.images, OnDisk):
            content = _files_hash(self.images.listing)
            chosen = [self.images.chosen[i] for i in self.chosen]
        else:
            raise UserError(f"{self.name} are no images: compare samples with a folder of images")
        indices = hashlib.sha256(repr(chosen).encode()).hexdigest()
        crop = {} if self.images.crop in (None, centre_crop) else {"crop": repr(self.images.crop)}
        return {"set": content, "chosen": indices, "shape": list(self.shape), **crop}


class GeneratedImages(ImageSource):
    """Samples 0 to num - 1, as they are when they are read.

    Args:
        samples: the sequence of samples.
        num: number of samples.
        channels: 3 converts grey images to RGB.
    """

    prefetch = False  # the network and the extractor share a device

    def __init__(self, samples: Samples, num: int, channels: int) -> None:
        nfe = samples.sampling.nfe
        self.name = samples.name if nfe is None else f"{samples.name}_nfe{nfe}"
        if samples.checkpoint is not None:
            self.name = f"{samples.file.stem}-step{samples.checkpoint.card.step}_{self.name}"
            self.class_names = samples.checkpoint.card.class_names
        if samples.shape[0] not in (1, channels):
            raise UserError(f"{self.name} has {samples.shape[0]} channels, these features are of {channels}")
        self.samples, self.num = samples, num
        # Once, since a running training may replace the file meanwhile; a network in training has none.
        self._file = {} if samples.file is None else file_state("checkpoint", samples.file)
        if samples.guide is not None:
            self._file["guide"] = file_state("file", samples.guide.file)
        self.shape = (channels, *samples.shape[1:])
        labels = samples.labels(range(num))
        self.labels = None if labels is None else torch.tensor(labels)

    def __len__(self) -> int:
        return self.num

    def read(self, indices: Sequence[int]) -> Tensor:
        return as_channels(self.samples.images(indices), self.shape[0])

    @property
    def nfe(self) -> int:
        return self.samples.nfe

    def fingerprint(self) -> dict[str, Any]:
        return {**self._file, "sampled": self.samples.metadata()}

    def content(self) -> list[Any]:
        about = self.samples.metadata()
        for key in PATHS:
            about.pop(key, None)  # `Processes.check_file` compares these files
        return [len(self), self.shape, about]

    def metadata(self) -> dict[str, Any]:
        return {**super().metadata(), **self.samples.metadata()}
