"""CIFAR-10 and CIFAR-100 from the official Python batches, extracted or in the official .tar.gz, read by torchvision.

The batches are pickles, which could run code: torchvision reads a file only if it has the official md5.
"""

from __future__ import annotations

import pickle
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from uvit_decay.data.batches import InMemory
from uvit_decay.data.datamodule import ImageData, Sizes
from uvit_decay.runtime.download import download, verify
from uvit_decay.runtime.errors import UserError, explain, one_line
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.typed import check_types

if TYPE_CHECKING:
    from torchvision import datasets


class _CIFAR(ImageData, ABC):
    """Base class of CIFAR-10 and CIFAR-100; --help shows these arguments and the arguments of each class.

    Args:
        batch_size: global batch size, over all devices.
        device_batch_size: most images per forward pass on a device; null: its whole share of the global batch.
        flip: mirror half of the training images.
        seed: random seed of the image order and the flips.
    """

    def __init__(
        self,
        path: str | Path = "data",
        download: bool = False,
        batch_size: int = 128,
        device_batch_size: int | None = None,
        flip: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(32, 3, batch_size, flip, seed, device_batch_size=device_batch_size)
        self.path = at_home(path)
        self.download = download
        self._failure: UserError | None = None  # set if the download fails

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of torchvision's class."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""

    def official(self) -> type[datasets.CIFAR10]:
        """Return torchvision's class, which defines file names, URL and checksums."""
        from torchvision import datasets

        return getattr(datasets, self.kind)

    def find_sizes(self) -> Sizes:
        """Return the sizes of the data set, which may not be downloaded yet."""
        return Sizes(self.image_size, self.channels, self.num_classes)

    def prepare_data(self) -> None:
        """Download the archive if `download` is set and the data is missing. Lightning calls this once per node."""
        if self.download and self._find() is None:
            official = self.official()
            try:
                download(official.url, self._archive(), official.tgz_md5, "md5")
            except UserError as error:  # `load` raises it on all processes; if raised here, the others would wait
                self._failure = error

    def load(self) -> None:
        """Read the files by torchvision and set `train`, `test` and `class_names`."""
        place = self._find()
        if place is None:
            raise self._failure or UserError(self._not_found())
        if place.is_dir():
            self._load_folder(place)
            return
        official = self.official()
        verify(place, official.tgz_md5, "md5")
        with tempfile.TemporaryDirectory() as root:
            with explain(f"cannot unpack {place}", OSError), tarfile.open(place) as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python before 3.11.4
                archive.extractall(root)
            self._load_folder(Path(root) / official.base_folder)

    def _load_folder(self, folder: Path) -> None:
        """Read the extracted files; torchvision compares their md5s before it unpickles them.

        Raises:
            UserError: a file is missing or is not the official file.
        """
        official = type(self.kind, (self.official(),), {"base_folder": folder.name})  # users may rename the folder
        try:
            train = official(folder.parent, train=True)
            test = official(folder.parent, train=False)
        except RuntimeError as error:
            for name, md5 in self._md5s().items():
                verify(folder / name, md5, "md5")
            raise UserError(f"cannot read {folder}: {one_line(error)}") from error
        self.class_names = tuple(self._names(folder, train))
        self.train = _in_memory(train, self._targets(folder, train))
        self.test = _in_memory(test, self._targets(folder, test))

    def _names(self, folder: Path, official: datasets.CIFAR10) -> Sequence[str]:
        """Return the names of the classes, from files with verified md5s."""
        return official.classes

    def _targets(self, folder: Path, official: datasets.CIFAR10) -> Sequence[int]:
        """Return the class of each image, from files with verified md5s."""
        return official.targets

    def _md5s(self) -> dict[str, str]:
        """Return the official md5 of each file to read, by name."""
        official = self.official()
        md5s = dict(official.train_list + official.test_list)
        md5s[official.meta["filename"]] = official.meta["md5"]
        return md5s

    def _archive(self) -> Path:
        """Return the path of the archive, present or to be downloaded."""
        if self.path.suffix in (".gz", ".tgz"):
            return self.path
        return self.path / self.official().filename

    def _find(self) -> Path | None:
        """Return the extracted folder if it exists, otherwise the archive if it exists, otherwise None."""
        if self.path.is_file():
            return self.path
        for folder in (self.path, self.path / self.official().base_folder):
            if any((folder / name).is_file() for name in self._md5s()):
                return folder
        archive = self._archive()
        if archive.is_file():
            return archive
        return None

    def _not_found(self) -> str:
        """Return the message of an error if neither the folder nor the archive exists."""
        official = self.official()
        sought = f"neither the folder {official.base_folder} nor {self._archive()} exists"
        hint = "see why its download failed" if self.download else "run train.py with --data.download true"
        return f"no {official.__name__} at {self.path}: {sought}; put {official.url} there, or {hint}"


@check_types
class CIFAR10(_CIFAR):
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 RGB, 10 classes.

    Args:
        path: cifar-10-batches-py, cifar-10-python.tar.gz, or the folder that contains one of them.
        download: download the archive (170 MB) into that folder if the data is missing.
    """

    kind = "CIFAR10"
    num_classes = 10


@check_types
class CIFAR100(_CIFAR):
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 RGB, 100 classes in 20 groups.

    Args:
        path: cifar-100-python, cifar-100-python.tar.gz, or the folder that contains one of them.
        download: download the archive (169 MB) into that folder if the data is missing.
        labels: the 100 classes ("fine") or the 20 groups ("coarse").
        options: batch_size, device_batch_size, flip and seed, as above.
    """

    kind = "CIFAR100"

    def __init__(
        self,
        path: str | Path = "data",
        download: bool = False,
        labels: Literal["fine", "coarse"] = "fine",
        **options: Any,
    ) -> None:
        super().__init__(path, download, **options)
        self.labels = labels

    @property
    def num_classes(self) -> int:
        """Number of classes, or of groups."""
        return 100 if self.labels == "fine" else 20

    @property
    def name(self) -> str:
        """Name of the training set in reports."""
        return "cifar100" if self.labels == "fine" else "cifar100-coarse"

    def _names(self, folder: Path, official: datasets.CIFAR10) -> Sequence[str]:
        if self.labels == "fine":
            return official.classes
        return _unpickle(folder / official.meta["filename"])["coarse_label_names"]

    def _targets(self, folder: Path, official: datasets.CIFAR10) -> Sequence[int]:
        if self.labels == "fine":
            return official.targets
        ((name, _),) = official.train_list if official.train else official.test_list
        return _unpickle(folder / name)["coarse_labels"]  # torchvision reads only the fine labels


def _unpickle(path: Path) -> dict[str, Any]:
    """Return the contents of a file; torchvision has verified its md5."""
    with path.open("rb") as file:
        return pickle.load(file, encoding="latin1")


def _in_memory(official: datasets.CIFAR10, targets: Sequence[int]) -> InMemory:
    """Convert torchvision's uint8 (n, 32, 32, 3) to a set of (n, 3, 32, 32)."""
    images = torch.from_numpy(official.data.transpose(0, 3, 1, 2)).contiguous()
    labels = torch.tensor(targets, dtype=torch.int64)
    return InMemory(images, labels)
