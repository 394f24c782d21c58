"""List the images of a folder, zip or tar with their classes; `labels.py` finds the classes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image

from uvit_decay.data.archives import ArchiveIndex, Kinds, file_states, find, open_members
from uvit_decay.data.classes import Folder, compose, folders_of, split_parts
from uvit_decay.data.decoding import formats
from uvit_decay.data.label_tables import TABLES, Columns
from uvit_decay.data.labels import AUTO, FOLDERS, LabelOptions, Labels, find_labels, find_table
from uvit_decay.data.splits import find_parts
from uvit_decay.files.writing import at_home
from uvit_decay.terminal.errors import UserError, with_flags

LOSSY = (".jpg", ".jpeg")
HEIF = (".heic", ".heics", ".heif", ".heifs", ".hif")  # read where pillow-heif is installed
MOST_KINDS = 5  # extensions in a message


@dataclass(frozen=True)
class Listing:
    """Places and labels of images. It holds no open file, so it can be pickled and sent to worker processes.

    Args:
        path: the folder, zip or tar.
        members: sorted names relative to `path`, '/' between folders.
        labels: indices into `class_names`; all 0 without classes.
        class_names: names of the classes; empty without classes.
        spans: places of the members of a tar, see `ArchiveIndex`.
        depth: number of folders around the images that do not identify them, see `Labels`.
        table: the table that the labels come from; empty for labels from folders.
        others: the number of the other visible files by extension.
        left_out: a line about each image that was listed and left out because it cannot be read.
        part: the folder of `path` that all images are in, if it is a part of a data set such as test; otherwise empty.
    """

    path: Path
    members: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    spans: np.ndarray | None = field(default=None, compare=False, repr=False)
    others: Kinds = field(default=(), compare=False, repr=False)
    left_out: tuple[str, ...] = field(default=(), compare=False, repr=False)
    depth: int | None = None
    table: str = ""
    part: str = ""

    def open(self) -> AbstractContextManager[Callable[[int], BytesIO]]:
        """Return a context with a function that reads image i; see `open_members`."""
        return open_members(self.path, self._index)

    @property
    def in_archive(self) -> bool:
        """True if the images are members of a zip or tar, so that their sizes are known without accessing each file."""
        return self.spans is not None or not self.path.is_dir()

    @property
    def has_jpegs(self) -> bool:
        """True if some images are JPEGs by their names."""
        return any(name.lower().endswith(LOSSY) for name in self.members)

    @property
    def stored_in(self) -> tuple[str, ...]:
        """The files that hold the images, relative to `path`: "" for an archive."""
        return self.members if self.path.is_dir() else ("",)

    def states(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the size in bytes of each image file at the indices `chosen`, in a zip also its CRC-32."""
        return file_states(self.path, self._index, chosen)

    def take(self, chosen: Sequence[int]) -> Listing:
        """Return the images at the indices `chosen`, with the same classes."""
        members = tuple(self.members[i] for i in chosen)
        labels = tuple(self.labels[i] for i in chosen)
        spans = self.spans
        if spans is not None:
            spans = spans[list(chosen)]
        return replace(self, members=members, labels=labels, spans=spans)

    @property
    def _index(self) -> ArchiveIndex:
        return ArchiveIndex(self.members, self.spans)


def list_images(
    path: str | Path,
    classes: Collection[str] | None = None,
    labels: LabelOptions = LabelOptions(),  # noqa: B008  frozen
) -> Listing:
    """List the images in a folder (links are followed), zip or tar, without decoding any; see `list_parts`."""
    training, _ = list_parts(path, classes, labels)
    return training


def list_parts(
    path: str | Path,
    classes: Collection[str] | None = None,
    labels: LabelOptions = LabelOptions(),  # noqa: B008  frozen
    argument: str = "",
) -> tuple[Listing, Listing | None]:
    """List the images in a folder (links are followed), zip or tar, without decoding any.

    If its folders are the parts of a data set, such as train and test, these are the training images and the test
    images of the same classes, of which they may lack some. Otherwise there are no test images. Archives inside it are
    not opened.

    Args:
        path: the folder, zip or tar.
        classes: list only images of these classes, which must all have training images; None lists all images.
        labels: where the labels come from.
        argument: name of the argument that is `path`, for errors.
    """
    path = at_home(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder, zip or tar", argument)
    extensions = list_extensions()
    images, beside = find(path, extensions | {*TABLES}).split(extensions)
    if not images.names:
        others = count_others(images.others, beside.names)
        kinds = ".png, .jpg, .webp and others; hidden files do not count; unpack archives that are inside"
        has = f"; it has {count_kinds(others)}{hint_at_heif(others)}" if others else ""
        sets = "Parquet files and data sets of the Hugging Face Hub are read by HubDataset"
        raise UserError(f"{path}: no images in it that can be read, in any folder ({kinds}){has}; {sets}")
    folders = folders_of(images.names).values()
    table = find_table(path, folders, beside, labels.columns) if labels.source == AUTO else None
    parts = find_parts(path, folders) if labels.source == AUTO and table is None else None
    if parts is None:
        found = find_labels(path, images, beside, labels, table)
        listing = _join(path, images, beside, found)
        return listing if classes is None else select(listing, classes), None
    training = _list_part(path, images, beside, labels, parts.training)
    if classes is not None:
        training = select(training, classes)
    test = None
    lines = [f"{'/'.join(parts.training)} has the training images"]
    for folder in parts.testing:
        name = "/".join(folder)
        if test is None:
            test = _list_part(path, images, beside, labels, folder)
            if classes is not None and not set(classes).isdisjoint(test.class_names):
                test = select(test, set(classes).intersection(test.class_names))
            test = adopt_classes(test, training)
            lines.append(f"{name} has the test images" if test is not None else f"{name} has other classes: not read")
        else:
            lines.append(f"{name} is not read")
    lines[-1] += f"; to take these folders as classes, set `labels` {FOLDERS}"
    rank_zero_info(with_flags(f"{path}: {', '.join(lines)}"))
    return training, test


def _list_part(path: Path, images: ArchiveIndex, beside: ArchiveIndex, labels: LabelOptions, root: Folder) -> Listing:
    """List the images in one of the parts of a data set, with the labels that it has as a data set of its own."""
    images, beside = _below(images, root), _below(beside, root)
    inner = root
    while all(split_parts(name)[: len(inner) + 1] == (*inner, root[-1]) for name in images.names):
        inner = (*inner, root[-1])  # seg_train/seg_train
    table = find_table(path, folders_of(images.names).values(), beside, labels.columns)
    listing = _join(path, images, beside, find_labels(path, images, beside, labels, table, inner))
    return replace(listing, part="/".join(root))


def _below(index: ArchiveIndex, root: Folder) -> ArchiveIndex:
    """Return the files in a folder and below it."""
    rows = [row for row, name in enumerate(index.names) if split_parts(name)[: len(root)] == root]
    return index.take(rows)


def _join(path: Path, images: ArchiveIndex, beside: ArchiveIndex, found: Labels) -> Listing:
    """Return the listing of images with their labels; `beside` are the tables, of which one may be read."""
    unused = [name for name in beside.names if f"{path}/{name}" != found.table]
    return Listing(
        path,
        images.names,
        found.labels,
        found.class_names,
        images.spans,
        count_others(images.others, unused),
        depth=found.depth,
        table=found.table,
    )


def check_columns(columns: Columns, *listings: Listing | None) -> None:
    """Raise a UserError if columns are named and no labels come from a table."""
    if columns != Columns() and not any(listing is not None and listing.table for listing in listings):
        raise UserError(f"{listings[0].path} has no table of labels; leave out `name_column` and `label_column`")


def adopt_classes(test: Listing, training: Listing) -> Listing | None:
    """Return test images with the class numbers of the training images; None if they have other classes or none.

    They may lack some of the classes. Names are compared in Unicode's composed form.
    """
    if bool(test.class_names) != bool(training.class_names):
        return None
    rank = {compose(name): label for label, name in enumerate(training.class_names)}
    known = [rank.get(compose(name)) for name in test.class_names]
    if None in known:
        return None
    labels = [known[label] if known else 0 for label in test.labels]
    return replace(test, labels=tuple(labels), class_names=training.class_names)


def select(listing: Listing, classes: Collection[str]) -> Listing:
    """Return the images of these classes only, labelled by the rank of their class among them, sorted."""
    class_names = tuple(sorted(classes))
    rank = {compose(name): label for label, name in enumerate(class_names)}
    missing = sorted(rank.keys() - set(map(compose, listing.class_names)))
    if missing:
        count = f"{len(missing)} of the {len(class_names)} classes have no images"
        place = "in the table of labels" if listing.table else "a folder of this name"
        raise UserError(f"{listing.path}: {count}, the first is {missing[0]}; each class must be {place}")
    known = [compose(name) for name in listing.class_names]
    kept, labels = [], []
    for i, label in enumerate(listing.labels):
        name = known[label]
        if name in rank:
            kept.append(i)
            labels.append(rank[name])
    return replace(listing.take(kept), labels=tuple(labels), class_names=class_names)


def describe_listing(listing: Listing, size: int | None = None, where: str = "") -> str:
    """Return what was read and what was not: "812 pictures in 10 classes, 32x32; not read: 3 .txt (no pictures)".

    Args:
        listing: the images.
        size: height and width to which they are cropped; None if it is not known.
        where: name of the file with the list of the images that were left out; empty if there is none.
    """
    text = f"{len(listing.members):,} pictures"
    if listing.class_names:
        text += f" in {len(listing.class_names):,} classes"
    if size is not None:
        text += f", {size}x{size}"
    unread = []
    if listing.others:
        unread.append(count_kinds(listing.others))
    if listing.left_out:
        place = f" (list in {where})" if where else ""
        unread.append(f"{len(listing.left_out):,} damaged{place}")
    if unread:
        text += f"; not read: {', '.join(unread)}"
    text += hint_at_heif(listing.others)
    used = len(set(listing.labels))
    if 2 * used > len(listing.members) and listing.class_names:
        text += "; that is more than half as many classes as pictures: look at `labels` and `label_column`"
    return text


def list_extensions() -> set[str]:
    """Return the file extensions of the image formats."""
    kinds = {*formats(), "MPO"}  # PIL's name for a JPEG followed by another one
    return {extension for extension, kind in Image.registered_extensions().items() if kind in kinds}


def count_others(others: Kinds, names: Iterable[str]) -> Kinds:
    """Return the numbers of files by extension with further files, given by name."""
    counts = Counter(dict(others))
    counts.update(os.path.splitext(name)[1].lower() for name in names)
    return tuple(counts.most_common())


def count_kinds(others: Kinds) -> str:
    """Return the numbers of files by extension as text; pictures of formats that are not read come first.

    For example, "2 .psd, 3 .txt (no pictures)".
    """
    known = {*Image.registered_extensions(), *HEIF}
    pictures = [(kind, count) for kind, count in others if kind in known]
    rest = [(kind, count) for kind, count in others if kind not in known]
    parts = []
    if pictures:
        parts.append(_join_counts(pictures))
    if rest:
        parts.append(f"{_join_counts(rest)} (no pictures)")
    return ", ".join(parts)


def hint_at_heif(others: Kinds) -> str:
    """Return how to read files of HEIF that are not read, after a semicolon; empty if there are none."""
    return "; to read HEIC: pip install pillow-heif" if any(kind in HEIF for kind, _ in others) else ""


def _join_counts(kinds: Sequence[tuple[str, int]]) -> str:
    named = [f"{count:,} {kind or 'without an extension'}" for kind, count in kinds[:MOST_KINDS]]
    more = sum(count for _, count in kinds[MOST_KINDS:])
    if more:
        named.append(f"{more:,} more")
    return ", ".join(named)
