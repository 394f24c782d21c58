"""The data module for image data sets of the `datasets` library: from the Hugging Face Hub, or from a folder."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.data.archives import DAMAGED
from uvit_decay.data.classes import class_hash
from uvit_decay.data.fingerprint import MOST_COMPARED, spread
from uvit_decay.data.folder import Images
from uvit_decay.data.label_tables import LABEL_WORDS
from uvit_decay.data.labels import AUTO, number_labels
from uvit_decay.data.listing import Listing
from uvit_decay.files.writing import at_home
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.typed import Needs, check_types

if TYPE_CHECKING:
    from datasets import Dataset

ROWS = 1000  # rows of a table at a time
DEFAULT_SPLIT = "train"
TEST_SPLIT = "test"  # of test_files
NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")  # webdataset's notation of shards, shard-{000..010}.tar
SAVED = ("dataset_dict.json", "state.json")  # one of them is in a folder that `save_to_disk` wrote


@dataclass(frozen=True)
class HubListing(Listing):
    """The images of a split: encoded images in memory-mapped Arrow files, or files that its rows name.

    `members` are the file names that the data set stores; an image without a file name has the number of its row.
    Pickling sends the names of the Arrow files.

    Args:
        rows: the split, with a column of images that are not decoded.
        split: name of the split.
        column: name of the column.
        sizes: int64 (n,), bytes of each encoded image; -1 for an image in a separate file.
    """

    rows: Dataset = field(default=None, compare=False, repr=False)
    split: str = "train"
    column: str = "image"
    sizes: np.ndarray = field(default=None, compare=False, repr=False)

    @contextmanager
    def open(self) -> Iterator[Callable[[int], BytesIO]]:
        """Yield a thread-safe function that returns the encoded image of a row."""

        def fetch(index: int) -> BytesIO:
            with explain(self.members[index], *DAMAGED):
                stored = self.rows[index][self.column]
                if stored["bytes"] is not None:
                    return BytesIO(stored["bytes"])
                return BytesIO(Path(stored["path"]).read_bytes())

        yield fetch

    def take(self, chosen: Sequence[int]) -> HubListing:
        """Return the images of these rows, with the same classes."""
        taken = super().take(chosen)
        return replace(taken, rows=self.rows.select(chosen), sizes=self.sizes[list(chosen)])

    @property
    def in_archive(self) -> bool:
        """True if all images are stored in Arrow files."""
        return bool((self.sizes >= 0).all())

    @property
    def stored_in(self) -> tuple[str, ...]:
        """The Arrow files, and the images that are in separate files."""
        files = [entry["filename"] for entry in self.rows.cache_files]
        files += [self.members[i] for i in np.flatnonzero(self.sizes < 0)]
        return tuple(files)

    def states(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the size of each image in bytes; if all are in Arrow files, also CRC-32s of at most MOST_COMPARED."""
        states: list[tuple[int, ...]] = [(self._size(index),) for index in chosen]
        if self.in_archive:
            with self.open() as fetch:
                for row in spread(len(chosen), MOST_COMPARED):
                    content = fetch(chosen[row]).getvalue()
                    states[row] += (zlib.crc32(content),)
        return states

    def _size(self, index: int) -> int:
        if self.sizes[index] >= 0:
            return int(self.sizes[index])
        with explain(f"{self.path} has changed", OSError):
            return os.stat(self.rows[index][self.column]["path"]).st_size


@check_types
class HubDataset(Images):
    """An image data set of the `datasets` library (`pip install -e ".[hub]"`), by name or from a folder.

    A folder is one that `save_to_disk` wrote, or one that `load_dataset` reads (imagefolder, Parquet). Images stay in
    memory-mapped Arrow files, and are decoded, scaled and cropped as in `Images`. Classes have the order of the
    ClassLabel; labels of another type are sorted, but integers in `files` are class indices.

    Args:
        path: a name on the Hub, such as ylecun/mnist, or a folder; with `files` the format of the files: webdataset,
            parquet or imagefolder.
        split: split of the training images; a folder of `save_to_disk` takes only names of splits, no train[:100].
        test_split: split of the test images, for validation loss and probes.
        subset: name of the configuration, for data sets that have several.
        image_column: column of the images; if there is no column `image`, the only column of images.
        label_column: column of the classes; null for images without classes. If there is no column `label`, the only
            one with a name such as cls (webdataset), fine_label or json.label.
        files: files of the training images: names with *, ** and {000..010}.
        test_files: files of the test images, instead of a test_split.
        holdout: without a test_split, the share of each class that is held out of training; 0 holds out none.
        options: of `Images`: image_size, channels, batch_size, device_batch_size, flip, memory_gb, num_workers, seed,
            skip_unreadable, white.
    """

    NEEDS = {"test_files": Needs("files", unless=[None]), "test_split": Needs("test_files", None)}

    def __init__(
        self,
        path: str | Path,
        split: str = DEFAULT_SPLIT,
        test_split: str | None = None,
        subset: str | None = None,
        image_column: str = "image",
        label_column: str | None = "label",
        holdout: float = 0.0,
        files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, holdout=holdout, **options)
        if self.test_path is not None or self.classes is not None:
            raise UserError("HubDataset has neither `test_path` nor `classes`; set `test_split`")
        if (self.labels, self.test_labels, self.name_column) != (AUTO, AUTO, None):
            raise UserError("HubDataset has neither `labels` nor `test_labels` nor `name_column`; set `label_column`")
        self.split = split
        self.test_split = test_split
        self.subset = subset
        self.image_column = image_column
        self.label_column = label_column
        self.files = files
        self.test_files = test_files
        if test_files is not None:
            self.test_name = f"{path}, files {test_files}"
        elif test_split is not None:
            self.test_name = f"{path}, split {test_split}"

    @property
    def name(self) -> str:
        """Name of the training set in reports: the last part of its path."""
        name = Path(self.path).name
        if self.files is not None:
            files = [self.files] if isinstance(self.files, str) else self.files
            name += f" {' '.join(Path(file).name for file in files)}"
        if self.subset is not None:
            name += f"-{self.subset}"
        return name

    def listings(self) -> tuple[Listing, Listing | None]:
        """Open the splits for training and testing."""
        training = self._open(self.split, self.files)
        if self.test_files is not None:
            return training, self._open(TEST_SPLIT, self.test_files)
        if self.test_split is not None:
            return training, self._open(self.test_split, self.files)
        return training, None

    def _open(self, split: str, files: str | list[str] | None) -> HubListing:
        """Open a split and list its images with their labels."""
        with explain("HubDataset needs the library datasets", ImportError, hint="pip install datasets"):
            from datasets import Image

        rows = load_split(self.path, split, self.subset, files)
        where = f"{self.path}, split {split}" if files is None else f"{self.path}, files {files}"
        if any(isinstance(kind, dict) for kind in rows.features.values()):
            rows = rows.flatten()  # json.label for the label in a JSON file
        image_column, label_column = self._choose_columns(rows, where)
        labels, class_names = self._labels(rows, label_column, where)
        rows = rows.select_columns([image_column]).cast_column(image_column, Image(decode=False))
        members, sizes = _names_and_sizes(rows, image_column)
        return HubListing(
            Path(self.path),
            members,
            labels,
            class_names,
            table="" if files is None else where,
            rows=rows,
            split=split,
            column=image_column,
            sizes=sizes,
        )

    def _choose_columns(self, rows: Dataset, where: str) -> tuple[str, str | None]:
        """Return the columns of images and of labels, in place of a missing default the only one that can be meant."""
        from datasets import Image

        columns = {"image_column": self.image_column, "label_column": self.label_column}
        pictures = [name for name, kind in rows.features.items() if isinstance(kind, Image)]
        words = [(name, set(re.split(r"[^a-z]+", name.lower()))) for name in rows.features]
        named = [name for name, parts in words if parts & {*LABEL_WORDS, "cls"}]
        found = {"image_column": ("image", pictures), "label_column": ("label", named)}
        for flag, (default, others) in found.items():
            column = columns[flag]
            if column is None or column in rows.features:
                continue
            if column != default or len(others) != 1:
                names = ", ".join(rows.features)
                raise UserError(f"{where}: no column {column}; set `{flag}` to one of {names}")
            columns[flag] = others[0]
            rank_zero_info(f"{where}: no column {column}, `{flag}` {others[0]} is taken")
        return columns["image_column"], columns["label_column"]

    def _labels(self, rows: Dataset, column: str | None, where: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the label of each image, and the names of the classes."""
        from datasets import ClassLabel

        if column is None:
            return (0,) * len(rows), ()
        kind = rows.features[column]
        values = rows.select_columns([column])[:][column]
        if isinstance(kind, ClassLabel):
            names = tuple(kind.names)
            if not all(isinstance(value, int) and 0 <= value < len(names) for value in values):
                raise UserError(f"{where}: images without a label; set another split, or `label_column` null")
            labels = tuple(values)
        elif self.files is not None:
            return number_labels(values, f"{where}, column {column}")
        else:
            if not all(isinstance(value, int | str) for value in values):
                raise UserError(f"{where}: `label_column` {column} has {kind}; set a column of names or numbers")
            classes = sorted(set(values))
            rank = {value: label for label, value in enumerate(classes)}
            labels = tuple(rank[value] for value in values)
            names = tuple(map(str, classes))
        class_hash(names)  # refuses names that cannot be displayed
        return labels, names


def load_split(path: str, split: str, subset: str | None = None, files: str | list[str] | None = None) -> Dataset:
    """Open a split of a data set; its Arrow files are memory-mapped.

    Args:
        path: a folder, or a name on the Hub; with `files` their format.
        split: name of the split.
        subset: name of the configuration; None if there is only one.
        files: patterns of the files of this split; None if the data set has its files.
    """
    import datasets

    if files is not None:
        patterns = _find_patterns([files] if isinstance(files, str) else files)
        named = {split.partition("[")[0]: patterns}
        with explain(f"cannot open {files} as {path}", Exception):
            return datasets.load_dataset(path, subset, split=split, data_files=named)
    folder = at_home(path)
    # Any error is possible: the network, a damaged file or the data set's own configuration may fail.
    with explain(f"cannot open the data set {path}, split {split}", Exception):
        if any((folder / name).is_file() for name in SAVED):
            return _load_saved(folder, split, subset)
        name = str(folder) if folder.exists() else path
        return datasets.load_dataset(name, subset, split=split)


def _find_patterns(patterns: Sequence[str]) -> list[str]:
    """Return patterns without numbers in braces, and with the home folder for ~."""
    found = []
    for pattern in patterns:
        for part in _expand_numbers(pattern):
            found.append(part if "://" in part else str(at_home(part)))
    return found


def _expand_numbers(pattern: str) -> list[str]:
    """Return the patterns that `x-{08..10}.tar` stands for: `x-08.tar`, `x-09.tar`, `x-10.tar`."""
    numbers = NUMBERS.search(pattern)
    if numbers is None:
        return [pattern]
    first, last = numbers.groups()
    found = []
    for number in range(int(first), int(last) + 1):
        part = f"{pattern[: numbers.start()]}{number:0{len(first)}d}{pattern[numbers.end() :]}"
        found += _expand_numbers(part)
    return found


def _load_saved(folder: Path, split: str, subset: str | None) -> Dataset:
    """Open a split of a folder that `save_to_disk` wrote: splits by name, or a single one that may have no name."""
    import datasets

    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UserError(f"{folder} has no split {split}; set `split` to one of {', '.join(found)}")
        found = found[split]
    elif split != str(found.split or DEFAULT_SPLIT):
        raise UserError(f"{folder} has no split {split}; set `split` {found.split or DEFAULT_SPLIT}")
    if subset not in (None, found.config_name):
        raise UserError(f"{folder} has no subsets; leave out `subset` {subset}")
    return found


def _names_and_sizes(rows: Dataset, column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the name of each image, and its size in bytes or -1 if it is in a separate file; no image is read."""
    import pyarrow.compute as pc

    names: list[str] = []
    sizes = []
    for table in rows.with_format("arrow").iter(ROWS):
        stored = table.column(column)
        encoded = pc.struct_field(stored, "bytes")
        lengths = pc.fill_null(pc.binary_length(encoded), -1)
        paths = pc.struct_field(stored, "path").to_pylist()
        for path in paths:
            names.append(f"row {len(names)}" if path is None else path)
        sizes.append(lengths.to_numpy())
    return tuple(names), np.concatenate(sizes).astype(np.int64)
