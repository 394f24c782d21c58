"""CIFAR-10 and CIFAR-100 from the official Python batches, extracted or in the official .tar.gz.

File names, URLs and checksums are those of torchvision. The batches are pickles, from which numpy's arrays are
made and nothing else is called.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.data.batches import InMemory
from uvit_decay.data.datamodule import ImageData
from uvit_decay.runtime.download import download, verify
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.files import at_home

if TYPE_CHECKING:
    from torchvision import datasets

_PIXELS = 3 * 32 * 32


class _CIFAR(ImageData, ABC):
    """Base class of CIFAR-10 and CIFAR-100; --help shows these arguments with those of either class.

    `keys` are the key of the labels in the batches and that of the class names in the meta file.

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

    @abstractmethod
    def official(self) -> type[datasets.CIFAR10]:
        """Return torchvision's class, which defines file names, URL and checksums."""

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
        contents = self._read_folder(place) if place.is_dir() else self._read_archive(place)
        official, (label_key, name_key) = self.official(), self.keys
        meta = official.meta["filename"]
        (names,) = _values(contents[meta], f"{place}/{meta}", name_key)
        if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
            raise UserError(f"{place}/{meta}: {name_key} is not a list of class names")
        self.class_names = tuple(names)
        self.train, self.test = (
            _joined([_batch(contents[name], f"{place}/{name}", label_key, len(names)) for name, _ in batches])
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
        sought = f"the folder {official.base_folder} or the archive {official.filename} in it"
        if self._archive() == self.path:
            sought = "an archive of that name"
        hint = "see why its download failed" if self.download else "set --data.download true"
        return f"no {official.__name__} at {self.path}: looked for {sought}; put {official.url} there, or {hint}"

    def _read_folder(self, folder: Path) -> dict[str, bytes]:
        """Read the files of the extracted archive; warn of those that are not the official ones."""
        md5s = self._md5s()
        missing = [name for name in md5s if not (folder / name).is_file()]
        if missing:
            hint = f"copy it again, or remove it and use {self.official().filename}"
            raise UserError(f"{folder}: incomplete, it lacks {', '.join(missing)}; {hint}")
        with explained(f"cannot read the files in {folder}", OSError):
            contents = {name: (folder / name).read_bytes() for name in md5s}
        actual = {name: hashlib.md5(content, usedforsecurity=False).hexdigest() for name, content in contents.items()}
        others = [str(folder / name) for name in md5s if actual[name] != md5s[name]]
        if others:
            warning = f"warning: not the official CIFAR batches (md5 differs): {', '.join(others)}"
            rank_zero_only(print)(warning, file=sys.stderr)
        return contents

    def _read_archive(self, path: Path) -> dict[str, bytes]:
        """Read the files into memory without extracting the archive, whose md5 is verified in place of theirs."""
        official = self.official()
        verify(path, official.tgz_md5, "md5")
        with tarfile.open(path, "r:gz") as archive:
            return {name: archive.extractfile(f"{official.base_folder}/{name}").read() for name in self._md5s()}


class CIFAR10(_CIFAR):
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 RGB, 10 classes.

    Args:
        path: cifar-10-batches-py, cifar-10-python.tar.gz, or the folder that contains one of them.
        download: download the archive (170 MB) into that folder if no data are present.
    """

    keys = "labels", "label_names"

    def official(self) -> type[datasets.CIFAR10]:
        """Return torchvision's class of CIFAR-10."""
        from torchvision import datasets

        return datasets.CIFAR10


class CIFAR100(_CIFAR):
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 RGB, 100 classes in 20 groups.

    Args:
        path: cifar-100-python, cifar-100-python.tar.gz, or the folder that contains one of them.
        download: download the archive (169 MB) into that folder if no data are present.
        labels: the 100 classes ("fine") or the 20 groups ("coarse").
        options: batch_size, device_batch_size, flip and seed, as above.
    """

    def __init__(
        self, path: str = "data", download: bool = False, labels: Literal["fine", "coarse"] = "fine", **options: Any
    ) -> None:
        super().__init__(path, download, **options)
        self.labels, self.keys = labels, (f"{labels}_labels", f"{labels}_label_names")

    @property
    def name(self) -> str:
        """Name of the training set in reports."""
        return "cifar100" if self.labels == "fine" else "cifar100-coarse"

    def official(self) -> type[datasets.CIFAR10]:
        """Return torchvision's class of CIFAR-100."""
        from torchvision import datasets

        return datasets.CIFAR100


class _Unpickler(pickle.Unpickler):
    """An unpickler that calls nothing but what pickles of numpy's arrays and of bytes call."""

    ALLOWED = {("_codecs", "encode"), ("numpy", "dtype"), ("numpy", "ndarray")}
    for _module in ("numpy.core", "numpy._core"):  # of numpy 1 and 2
        ALLOWED |= {(f"{_module}.multiarray", "_reconstruct"), (f"{_module}.numeric", "_frombuffer")}

    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")  # the text of Python 2, in which arrays are, too
        self.where = where

    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in self.ALLOWED:
            raise UserError(f"{self.where} is a pickle that wants to run {f'{module}.{name}'[:200]}: refused")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _values(content: bytes, where: str, *keys: str) -> list[Any]:
    """Return the values of these keys of the dict in a pickle; raise a UserError that begins with `where`."""
    with explained(f"{where}: not a pickle of CIFAR, or damaged", Exception):  # damaged bytes raise nearly anything
        values = _Unpickler(content, where).load()
        if missing := [key for key in keys if key not in values]:
            raise UserError(f"{where}: has no {' and no '.join(missing)}, only {str(list(values))[:200]}")
        return [values[key] for key in keys]


def _batch(content: bytes, where: str, key: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 (n, 3072), and labels (n,); raise a UserError if the file is not a valid CIFAR batch."""
    with explained(f"{where}: not a CIFAR batch", ValueError):
        data, labels = (np.asarray(values) for values in _values(content, where, "data", key))
        if data.dtype != np.uint8 or data.shape[1:] != (_PIXELS,):
            raise ValueError(f"data must be uint8 (n, {_PIXELS}), it is {data.dtype} {data.shape}")
        if labels.dtype.kind != "i" or labels.shape != data.shape[:1]:
            raise ValueError(f"{len(data)} images but {key} are {labels.dtype} {labels.shape}")
        if not ((labels >= 0) & (labels < classes)).all():
            raise ValueError(f"{key} are {labels.min()} to {labels.max()}, but the meta file names {classes} classes")
    return data, labels


def _joined(batches: list[tuple[np.ndarray, np.ndarray]]) -> InMemory:
    """Join batches into one set; a row of 3072 bytes holds the red, green and blue plane, each row by row."""
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return InMemory(torch.from_numpy(images.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.astype(np.int64)))
