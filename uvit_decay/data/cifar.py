"""CIFAR-10 and CIFAR-100 by torchvision, from the official folder or .tar.gz.

The files are pickles, which could run code: torchvision reads a file only if it has the official md5.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from uvit_decay.data.batches import InMemory
from uvit_decay.data.datamodule import ImageData, Sizes
from uvit_decay.files.download import verify
from uvit_decay.files.writing import at_home
from uvit_decay.terminal.errors import UserError, explain, one_line
from uvit_decay.terminal.typed import check_types

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

    kind: str  # name of torchvision's class

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""

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

    def official(self) -> type[datasets.CIFAR10]:
        """Return torchvision's class, which defines file names, URL and checksums."""
        from torchvision import datasets

        return getattr(datasets, self.kind)

    def find_sizes(self) -> Sizes:
        """Return the sizes of the data set, which may not be downloaded yet."""
        return Sizes(self.image_size, self.channels, self.num_classes)

    def prepare_data(self) -> None:
        """Download and unpack the data if `download` is set and it is missing. Lightning calls this once per node.

        `load` reports a download that has failed, in all processes: those that wait here would not see an error.
        """
        if self.download and self._find() is None:
            official = self.official()
            try:
                official(self.path, download=True)
            except (OSError, RuntimeError) as error:
                print(f"cannot download {official.url}: {one_line(error)}", file=sys.stderr)

    def load(self) -> None:
        """Read the files by torchvision and set `train`, `test` and `class_names`."""
        place = self._find()
        official = self.official()
        if place is None:
            sought = f"neither the folder {official.base_folder} nor {official.filename} is in it"
            raise UserError(
                f"no {self.kind} in {self.path}: {sought}; put {official.url} there, or let train.py fetch it with "
                "--data.download true"
            )
        if place.is_dir():
            self._read(place.parent)
            return
        from torchvision.datasets.utils import extract_archive

        verify(place, official.tgz_md5, "md5")
        with tempfile.TemporaryDirectory() as folder:  # `path` may be read-only
            with explain(f"cannot unpack {place}", OSError):
                extract_archive(str(place), folder)
            self._read(Path(folder))

    def _find(self) -> Path | None:
        """Return the official folder or the archive, at `path` or in it; None if there is neither."""
        official = self.official()
        for folder in (self.path / official.base_folder, self.path):
            if folder.name == official.base_folder and folder.is_dir():
                return folder
        for file in (self.path, self.path / official.filename):
            if file.is_file():
                return file
        return None

    def _read(self, root: Path) -> None:
        """Read the official folder in `root`; torchvision compares the md5s of its files before it unpickles them."""
        official = self.official()
        folder = root / official.base_folder
        hint = f"a file is missing or is not the official one: unpack {official.filename} again"
        with explain(f"cannot read {folder}", RuntimeError, hint=hint):
            train = official(root, train=True)
            test = official(root, train=False)
        self.class_names = tuple(train.classes)
        self.train = _in_memory(train)
        self.test = _in_memory(test)


def _in_memory(official: datasets.CIFAR10) -> InMemory:
    """Convert torchvision's uint8 (n, 32, 32, 3) to a set of (n, 3, 32, 32)."""
    images = torch.from_numpy(official.data.transpose(0, 3, 1, 2)).contiguous()
    return InMemory(images, torch.tensor(official.targets, dtype=torch.int64))


@check_types
class CIFAR10(_CIFAR):
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 RGB, 10 classes.

    Args:
        path: cifar-10-batches-py, cifar-10-python.tar.gz, or the folder that contains one of them.
        download: download and unpack the archive (170 MB) in that folder if the data is missing.
    """

    kind = "CIFAR10"
    num_classes = 10


@check_types
class CIFAR100(_CIFAR):
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 RGB, 100 classes in 20 groups.

    Args:
        path: cifar-100-python, cifar-100-python.tar.gz, or the folder that contains one of them.
        download: download and unpack the archive (169 MB) in that folder if the data is missing.
        labels: the 100 classes ("fine") or the 20 groups ("coarse").
        options: batch_size, device_batch_size, flip and seed, as above.
    """

    kind = "CIFAR100"
    num_classes = 100

    def __init__(
        self,
        path: str | Path = "data",
        download: bool = False,
        labels: Literal["fine", "coarse"] = "fine",
        **options: Any,
    ) -> None:
        super().__init__(path, download, **options)
        self.labels = labels
        if labels == "coarse":
            self.num_classes = 20

    @property
    def name(self) -> str:
        """Name of the training set in reports."""
        return "cifar100" if self.labels == "fine" else "cifar100-coarse"

    def _read(self, root: Path) -> None:
        super()._read(root)
        if self.labels == "coarse":  # torchvision reads only the fine ones; it has verified the files
            official = self.official()
            folder = root / official.base_folder
            self.class_names = tuple(_unpickle(folder / official.meta["filename"])["coarse_label_names"])
            for images, ((name, _),) in ((self.train, official.train_list), (self.test, official.test_list)):
                images.labels = torch.tensor(_unpickle(folder / name)["coarse_labels"], dtype=torch.int64)


def _unpickle(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return pickle.load(file, encoding="latin1")
