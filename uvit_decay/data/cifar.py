"""CIFAR-10 and CIFAR-100 from the official Python batches, extracted or in the official .tar.gz.

File names, URLs and checksums are those of torchvision. The batches are pickles, which could run code: none is read
unless its md5 is the official one.
"""

from __future__ import annotations

import pickle
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from uvit_decay.data.batches import InMemory
from uvit_decay.data.datamodule import ImageData
from uvit_decay.runtime.download import download, verify
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home

if TYPE_CHECKING:
    from torchvision import datasets


class _CIFAR(ImageData, ABC):
    """Base class of CIFAR-10 and CIFAR-100; --help shows these arguments with those of either class.

    `keys` are those of the labels in the batches and of the names in the meta file.

    Args:
        batch_size: global batch size, over all devices.
        device_batch_size: most images per forward pass on a device; null: its whole share of the global batch.
        flip: mirror half of the training images.
        seed: random seed of the image order and the flips.
    """

    keys: tuple[str, str]

    def __init__(
        self,
        path: str = "data",
        download: bool = False,
        batch_size: int = 128,
        device_batch_size: int | None = None,
        flip: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(32, 3, batch_size, flip, seed, device_batch_size=device_batch_size)
        self.path, self.download = at_home(path), download
        self._failure: UserError | None = None  # set if the download fails

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of torchvision's class."""

    def official(self) -> type[datasets.CIFAR10]:
        """Return torchvision's class, which defines file names, URL and checksums."""
        from torchvision import datasets

        return getattr(datasets, self.kind)

    def prepare_data(self) -> None:
        """Download the archive if `download` is set and no data are present. Lightning calls this once per node."""
        if self.download and self._find() is None:
            official = self.official()
            try:
                download(official.url, self._archive(), official.tgz_md5, "md5")
            except UserError as error:  # raised by `load` on all processes: here the others would wait
                self._failure = error

    def load(self) -> None:
        """Read the files and set `train`, `test` and `class_names`."""
        place = self._find()
        if place is None:
            raise self._failure or UserError(self._not_found())
        contents = {name: pickle.loads(content, encoding="latin1") for name, content in self._official_files(place)}
        official, (label_key, name_key) = self.official(), self.keys
        self.class_names = tuple(contents[official.meta["filename"]][name_key])
        self.train, self.test = (
            _joined([contents[name] for name, _ in batches], label_key)
            for batches in (official.train_list, official.test_list)
        )

    def _md5s(self) -> dict[str, str]:
        """Return the official md5 of each file to read, by name."""
        official = self.official()
        return {**dict(official.train_list + official.test_list), official.meta["filename"]: official.meta["md5"]}

    def _archive(self) -> Path:
        """Return the path of the archive, present or to be downloaded."""
        return self.path if self.path.suffix in (".gz", ".tgz") else self.path / self.official().filename

    def _find(self) -> Path | None:
        """Return the extracted folder if present, else the archive if present, else None."""
        if self.path.is_file():
            return self.path
        for folder in (self.path, self.path / self.official().base_folder):
            if any((folder / name).is_file() for name in self._md5s()):
                return folder
        return self._archive() if self._archive().is_file() else None

    def _not_found(self) -> str:
        official = self.official()
        sought = f"the folder {official.base_folder} in it and for {self._archive()}"
        hint = "see why its download failed" if self.download else "set --data.download true"
        return f"no {official.__name__} at {self.path}: looked for {sought}; put {official.url} there, or {hint}"

    def _official_files(self, place: Path) -> Iterator[tuple[str, bytes]]:
        """Yield name and contents of each file in the extracted folder or the archive, which is not extracted.

        Raises:
            UserError: a checksum differs, or a file is missing.
        """
        official = self.official()
        if place.is_dir():
            for name, md5 in self._md5s().items():
                verify(place / name, md5, "md5")
                yield name, (place / name).read_bytes()
        else:
            verify(place, official.tgz_md5, "md5")
            with tarfile.open(place, "r:gz") as archive:
                yield from ((n, archive.extractfile(f"{official.base_folder}/{n}").read()) for n in self._md5s())


class CIFAR10(_CIFAR):
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 RGB, 10 classes.

    Args:
        path: cifar-10-batches-py, cifar-10-python.tar.gz, or the folder that contains one of them.
        download: download the archive (170 MB) into that folder if no data are present.
    """

    kind, keys = "CIFAR10", ("labels", "label_names")


class CIFAR100(_CIFAR):
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 RGB, 100 classes in 20 groups.

    Args:
        path: cifar-100-python, cifar-100-python.tar.gz, or the folder that contains one of them.
        download: download the archive (169 MB) into that folder if no data are present.
        labels: the 100 classes ("fine") or the 20 groups ("coarse").
        options: batch_size, device_batch_size, flip and seed, as above.
    """

    kind = "CIFAR100"

    def __init__(
        self, path: str = "data", download: bool = False, labels: Literal["fine", "coarse"] = "fine", **options: Any
    ) -> None:
        super().__init__(path, download, **options)
        self.labels, self.keys = labels, (f"{labels}_labels", f"{labels}_label_names")

    @property
    def name(self) -> str:
        """Name of the training set in reports."""
        return "cifar100" if self.labels == "fine" else "cifar100-coarse"


def _joined(batches: Sequence[dict[str, Any]], key: str) -> InMemory:
    """Join batches into one set; a row of 3072 bytes holds the red, green and blue plane, each row by row."""
    images, labels = (np.concatenate([batch[name] for batch in batches]) for name in ("data", key))
    return InMemory(torch.from_numpy(images.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.astype(np.int64)))
