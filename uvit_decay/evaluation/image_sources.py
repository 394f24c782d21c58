"""Image sources for evaluation, read by index: a folder, zip or tar, an array, a data set, or samples."""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from einops import repeat
from torch import Tensor

from uvit_decay.data.batches import ImageSet, InMemory
from uvit_decay.data.decoding import AS_TRAINED, Decoding, Reading, centre_crop
from uvit_decay.data.fingerprint import MOST_MEASURED, hash_array, hash_states, spread
from uvit_decay.data.labels import number_labels
from uvit_decay.data.listing import describe_listing, list_images
from uvit_decay.data.reading import OnDisk, check_headers, read, size_of
from uvit_decay.evaluation import npz
from uvit_decay.generation.samples import Samples
from uvit_decay.pictures import to_grey
from uvit_decay.runtime.distributed import COMPARED
from uvit_decay.runtime.random import subset
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.typed import check_types

READ = 64  # images of files whose pixels are in the fingerprint: how files are decoded may change


class ImageSource(ABC):
    """A sequence of uint8 images of the same shape.

    Attributes:
        name: name of the images in keys and reports.
        shape: shape of an image, (c, h, w).
        labels: indices into `class_names`, int64 (n,) on the CPU, or None.
        class_names: names of the classes.
        has_jpegs: whether there are JPEGs, whose artefacts affect every metric.
        prefetch: whether a thread may read the next batch while features of the last one are extracted.
        nfe: network evaluations so far, counted per image, if a network generates the images.
    """

    name: str
    shape: tuple[int, int, int]
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()
    has_jpegs = False
    prefetch = True
    nfe = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: Sequence[int]) -> Tensor:
        """Return the images at `indices`, uint8 (b, c, h, w), on any device."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return a fingerprint, as plain values; stored features may be reused while it stays the same."""

    def content(self) -> list[Any]:
        """Return values that are equal on all nodes if the images are, whatever their paths and times."""
        return [len(self), self.shape, self.checksum(COMPARED)]

    def checksum(self, count: int) -> int:
        """Return the CRC-32 of at most `count` images as they are read, a fixed random choice."""
        few = self.read(subset(range(len(self)), count, "compared"))
        return zlib.crc32(few.cpu().contiguous().numpy())

    def describe(self) -> str:
        """Return a line about the files that were read and that were not; empty for images that are not files."""
        return ""

    def metadata(self) -> dict[str, Any]:
        """Return metadata for reports, as plain values."""
        return {"name": self.name, "n": len(self), "size": f"{self.shape[2]}x{self.shape[1]}"}


def expand_channels(images: Tensor, channels: int) -> Tensor:
    """Return images (b, c, h, w), grey ones repeated for all channels; contiguous, because rounding depends on strides.

    Args:
        images: images of 1 or `channels` channels.
        channels: number of channels.
    """
    if images.shape[1] != channels:
        images = repeat(images, "n 1 h w -> n c h w", c=channels)
    return images.clone(memory_format=torch.contiguous_format)


@check_types
class FileImages(ImageSource):
    """All images of a folder (at any depth), zip or tar, in the order of their names.

    Args:
        path: the folder or archive.
        channels: 1 reads images as grey, 3 as RGB.
        image_size: size that images are cropped to, as ADM does; with None they must be squares of the same size.
        reading: how values of a file become 8 bits.
    """

    def __init__(
        self, path: Path, channels: Literal[1, 3], image_size: int | None, reading: Reading = AS_TRAINED
    ) -> None:
        self.listing = list_images(path)
        side = image_size or size_of(self.listing)
        self.decoding = Decoding(side, channels, exact=image_size is None, reading=reading)
        measured = spread(len(self.listing.members), MOST_MEASURED)
        check_headers(self.listing, measured, side if self.decoding.exact else None)
        place = path.resolve()
        self.name = place.name if place.is_dir() else place.stem
        self.shape = (channels, side, side)
        self.has_jpegs = self.listing.has_jpegs
        if self.listing.class_names:
            self.labels = torch.tensor(self.listing.labels)
            self.class_names = self.listing.class_names

    def __len__(self) -> int:
        return len(self.listing.members)

    def read(self, indices: Sequence[int]) -> Tensor:
        return read(self.listing, self.decoding, indices)

    def describe(self) -> str:
        return f"{self.listing.path}: {describe_listing(self.listing, self.shape[1])}"

    def fingerprint(self) -> dict[str, Any]:
        fingerprint = {
            "path": str(self.listing.path.resolve()),
            "files": hash_states(self.listing),
            "shape": list(self.shape),
            "read": self.checksum(READ),
            "reading": repr(self.decoding.reading),
        }
        if self.listing.table:  # its file is not one of the images
            fingerprint["labels"] = hash_array(self.labels)
        return fingerprint


def describe_file(kind: str, path: Path) -> dict[str, Any]:
    """Return the path of a file under the key `kind`, its size and its modification time."""
    with explain(f"cannot read {path}", OSError):
        stat = path.stat()
    return {kind: str(path.resolve()), "size": stat.st_size, "time": stat.st_mtime_ns}


@check_types
class ArrayImages(ImageSource):
    """Images of an .npz as ADM's suite and sample.py write it: `arr_0` uint8 (n, h, w, c), labels `arr_1` int64 (n,).

    The whole array is read into memory, after it has been compared with its checksum in the file.

    Args:
        path: the .npz file.
        channels: 1 for grey, 3 for RGB; images are converted to either, as those of a folder.
    """

    def __init__(self, path: Path, channels: Literal[1, 3]) -> None:
        self.path = path
        present = npz.names(path)
        if "arr_0" not in present:
            raise UserError(f"{path} has no images: store them as arr_0, uint8 (n, h, w, c)")

        def fits(shape: tuple[int, ...], dtype: np.dtype) -> bool:
            return dtype == np.uint8 and len(shape) == 4 and 0 not in shape and shape[3] in (1, 3)

        self.array = npz.read(path, "arr_0", "uint8 (n, h, w, 1 or 3)", fits)
        _, height, width, _ = self.array.shape
        self.name = path.stem
        self.shape = (channels, height, width)
        if "arr_1" in present:
            n = len(self.array)
            expected = f"labels, whole numbers, ({n},)"
            labels = npz.read(path, "arr_1", expected, lambda shape, dtype: shape == (n,) and dtype.kind in "iu")
            numbers, self.class_names = number_labels(labels.tolist(), f"{path}, arr_1")
            self.labels = torch.tensor(numbers)

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: Sequence[int]) -> Tensor:
        images = torch.from_numpy(self.array[list(indices)]).permute(0, 3, 1, 2)
        if images.shape[1] > self.shape[0]:
            images = to_grey(images)
        return expand_channels(images, self.shape[0])

    def fingerprint(self) -> dict[str, Any]:
        return {**describe_file("path", self.path), "shape": list(self.shape)}


class DatasetImages(ImageSource):
    """Images of a data set.

    Args:
        name: name in keys and reports, such as cifar100-train.
        images: the data set.
        channels: 3 converts grey images to RGB.
        class_names: names of its labels; empty if it has none.
    """

    def __init__(self, name: str, images: ImageSet, channels: int, class_names: tuple[str, ...]) -> None:
        self.name = name
        self.images = images
        self.class_names = class_names
        first, _ = images[[0]]
        _, stored_channels, height, width = first.shape
        _check_channels(name, stored_channels, channels)
        self.shape = (channels, height, width)
        self.has_jpegs = images.has_jpegs
        if class_names:
            self.labels = images.labels

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: Sequence[int]) -> Tensor:
        images, _ = self.images[list(indices)]
        return expand_channels(images, self.shape[0])

    def fingerprint(self) -> dict[str, Any]:
        if isinstance(self.images, InMemory):
            content = hashlib.sha256(self.images.images.cpu().contiguous().numpy()).hexdigest()
            chosen = list(range(len(self)))
        elif isinstance(self.images, OnDisk):
            content = hash_states(self.images.listing)
            chosen = list(self.images.chosen)
        else:
            raise UserError(f"{self.name} cannot be compared with samples: give a folder of images")
        indices = hashlib.sha256(repr(chosen).encode()).hexdigest()
        fingerprint = {"set": content, "chosen": indices, "shape": list(self.shape)}
        if isinstance(self.images, OnDisk):
            fingerprint["read"] = self.checksum(READ)
            reading = self.images.decoding.reading
            if reading.key:
                fingerprint["reading"] = reading.key
        if self.images.crop not in (None, centre_crop):
            fingerprint["crop"] = repr(self.images.crop)
        return fingerprint


class ChosenImages(ImageSource):
    """Some of the images of a source.

    Args:
        images: the source.
        chosen: indices of the images.
    """

    def __init__(self, images: ImageSource, chosen: list[int]) -> None:
        self.images = images
        self.chosen = chosen
        self.name = images.name
        self.shape = images.shape
        self.class_names = images.class_names
        self.has_jpegs = images.has_jpegs
        self.prefetch = images.prefetch
        if images.labels is not None:
            self.labels = images.labels[chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, indices: Sequence[int]) -> Tensor:
        return self.images.read([self.chosen[i] for i in indices])

    def fingerprint(self) -> dict[str, Any]:
        chosen = hashlib.sha256(repr(self.chosen).encode()).hexdigest()
        return {"of": self.images.fingerprint(), "chosen": chosen}


def choose_reference(images: ImageSource, most: int) -> ImageSource:
    """Return the images, or `most` of them: the same random choice in training and in evaluate.py."""
    if len(images) <= most:
        return images
    return ChosenImages(images, subset(images, most, "reference"))


def _check_channels(name: str, stored: int, channels: int) -> None:
    """Raise a UserError unless images are grey or have the number of channels."""
    if stored not in (1, channels):
        raise UserError(f"{name} has {stored} channels, but the features need {channels}")


class GeneratedImages(ImageSource):
    """Samples 0 to num - 1, generated when they are read.

    Args:
        samples: the sequence of samples.
        num: number of samples.
        channels: 3 converts grey images to RGB.
        class_names: names of the classes of a network in training; those of a checkpoint are in the file.
    """

    prefetch = False  # the network and the extractor share a device

    def __init__(self, samples: Samples, num: int, channels: int, class_names: tuple[str, ...] = ()) -> None:
        self.samples = samples
        self.num = num
        self.class_names = class_names
        self.name = samples.name
        nfe = samples.sampling.nfe
        if nfe is not None:
            self.name += f"_nfe{nfe}"
        if samples.checkpoint is not None:
            card = samples.checkpoint.card
            self.name = f"{samples.file.stem}-step{card.step}_{self.name}"
            self.class_names = card.class_names
        stored_channels, height, width = samples.shape
        _check_channels(self.name, stored_channels, channels)
        self.shape = (channels, height, width)
        # Read once, because a running training may replace the file meanwhile. A network in training has no file.
        self._file: dict[str, Any] = {}
        if samples.file is not None:
            self._file |= describe_file("checkpoint", samples.file)
        if samples.guide is not None:
            self._file["guide"] = describe_file("file", samples.guide.file)
        labels = samples.labels(range(num))
        if labels is not None:
            self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return self.num

    def read(self, indices: Sequence[int]) -> Tensor:
        return expand_channels(self.samples.images(indices), self.shape[0])

    @property
    def nfe(self) -> int:
        return self.samples.nfe

    def fingerprint(self) -> dict[str, Any]:
        return {**self._file, "sampled": self.samples.metadata()}

    def content(self) -> list[Any]:
        return [len(self), self.shape, self.samples.settings()]

    def metadata(self) -> dict[str, Any]:
        return {**super().metadata(), **self.samples.metadata()}
