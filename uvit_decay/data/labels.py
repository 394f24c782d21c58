"""Labels of images: from a table of names and labels, or from their folders.

`find_labels` reads them for everything that lists images: data modules, the encoder of latents and evaluation.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.data.archives import ArchiveIndex, open_members
from uvit_decay.data.classes import (
    Folder,
    check_splits,
    class_hash,
    count_wrappers,
    first_level,
    folders_of,
    lowest_level,
    split_parts,
)
from uvit_decay.data.label_tables import DATASET, METADATA, NoLabels, Table, read_table
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home

AUTO = "auto"
FOLDERS = "folders"
LEAF = "leaf"
NO_CLASSES = "null"  # as it is typed
MOST_CLASSES = 100_000  # limit of integer labels
TABLES = (".json", ".jsonl", ".csv", ".parquet")  # extensions of tables beside images
SAMPLES = (".cls", ".json")  # extensions of labels in shards of webdataset
SHARD = re.compile(r"\d{5}/img\d{8}\.png")  # names of images by EDM's and StyleGAN's dataset_tool.py


@dataclass(frozen=True)
class LabelOptions:
    """Source of the labels of images.

    Args:
        source: "auto", "folders", "leaf" or the path of a table; None for images without classes.
        column: the column of labels in a table; None takes the only one.
        flag: the option that sets `source`, for messages; empty if only a configuration can.
        column_flag: the option that sets `column`, for messages.
        needs_table: refuse `column` without a table; false for test images, whose column is the training images'.
    """

    source: str | None = AUTO
    column: str | None = None
    flag: str = "--data.labels"
    column_flag: str = "--data.label_column"
    needs_table: bool = True

    def typed(self, source: str) -> str:
        """Return what to set for another source of labels."""
        return f"{self.flag} {source}" if self.flag else f"data.labels {source} in a configuration"


@dataclass(frozen=True)
class Labels:
    """Labels of images, in the order of the images.

    Args:
        labels: indices into `class_names`; all 0 without classes.
        class_names: names of the classes; empty without classes.
        depth: number of folders at the beginning of each name that do not identify an image; None if only the last
            folder and the file name do.
        table: the table that the labels come from; empty for labels from folders.
    """

    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    depth: int | None
    table: str = ""


def find_labels(path: Path, images: ArchiveIndex, others: ArchiveIndex, options: LabelOptions) -> Labels:
    """Return the labels of the images in a folder, zip or tar.

    Args:
        path: the folder or archive.
        images: its images.
        others: its files with the extensions TABLES and SAMPLES.
        options: where the labels come from.

    Raises:
        UserError: an image has no label, labels are neither class indices nor names, or the folders are no classes.
    """
    _name_samples(path, images, others)
    source = options.source
    folders = folders_of(images.names)
    if source == AUTO:
        found = _find_table(path, folders.values(), others, options)
        if found is not None:
            table, level = found
            keys = [lambda parts: "/".join(parts[level:])]
            return _label_by_table(path, images.names, table, keys, level, options)
        if _are_shards(images.names, others.names):
            return _label_none(folders, images.names)
    elif source is None:
        return _label_none(folders, images.names)
    elif source not in (FOLDERS, LEAF):
        depth = count_wrappers(folders.values())
        return _label_by_table(path, images.names, _open_table(options), _list_keys(path, depth), depth, options)
    if options.column is not None and options.needs_table:
        raise UserError(f"{path} has no table of labels; leave out {options.column_flag} {options.column}")
    return _label_by_folders(path, images.names, folders, options)


def _label_none(folders: dict[str, Folder], names: Sequence[str]) -> Labels:
    return Labels((0,) * len(names), (), count_wrappers(folders.values()))


def _label_by_folders(path: Path, names: Sequence[str], folders: dict[str, Folder], options: LabelOptions) -> Labels:
    """Return the labels of images in class folders; images at the top have no classes."""
    parts = set(folders.values())
    depth: int | None = count_wrappers(parts)
    if options.source == LEAF:
        depth = None
        class_of = lowest_level(path, parts)
    else:
        if options.source == AUTO:
            check_splits(path, parts, depth, options.typed(FOLDERS))
        class_of = first_level(path, parts, depth)
    class_names = tuple(sorted(set(class_of.values()) - {""}))
    class_hash(class_names)  # refuses names that cannot be displayed
    if options.source == AUTO and any(len(folder) > depth + 1 for folder in parts):
        count = f"{len(class_names)} classes by the folders of the first level"
        rank_zero_info(f"{path}: {count}; to take the lowest folders, set {options.typed(LEAF)}")
    rank = {name: label for label, name in enumerate(class_names)}
    label_of = {folder: rank.get(class_of[folder_parts], 0) for folder, folder_parts in folders.items()}
    labels = tuple(label_of[name.rpartition("/")[0]] for name in names)
    return Labels(labels, class_names, depth)


def _find_table(
    path: Path, folders: Collection[Folder], others: ArchiveIndex, options: LabelOptions
) -> tuple[Table, int] | None:
    """Return the table of labels at the top or in a folder around all images, with the number of folders around it.

    A table without labels is named and left out.
    """
    common = os.path.commonprefix(list(folders))  # of tuples: their common first parts
    place = {split_parts(name): number for number, name in enumerate(others.names)}
    for level in range(len(common) + 1):
        for name in (DATASET, *METADATA):
            number = place.get((*common[:level], name))
            if number is None:
                continue
            with open_members(path, others) as fetch:
                content = fetch(number).getvalue()
            try:
                table = read_table(f"{path}/{others.names[number]}", content, options.column, options.column_flag)
            except NoLabels as error:
                rank_zero_info(f"{error}: it is not read")
                continue
            return table, level
    return None


def _are_shards(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether the folders of images are shards of EDM's or StyleGAN's tool, not classes."""
    if not any(split_parts(name)[-1] == DATASET for name in others):
        return False
    return all(SHARD.fullmatch("/".join(split_parts(name)[-2:])) for name in names)


def _open_table(options: LabelOptions) -> Table:
    """Return the table in the file that the option names."""
    file = at_home(options.source)
    if not os.path.isfile(file):
        kinds = f"{AUTO}, {FOLDERS}, {LEAF}, {NO_CLASSES}, or a table (.json, .jsonl, .csv, .tsv, .txt, .parquet)"
        raise UserError(f"{options.flag} {options.source}: no such file; give {kinds}")
    with open_members(file.parent, ArchiveIndex((file.name,))) as fetch:
        return read_table(str(file), fetch(0).getvalue(), options.column, options.column_flag)


Key = Callable[[Folder], str]  # the name in a table, of an image by its parts


def _list_keys(path: Path, depth: int) -> list[Key]:
    """Return how a table of one's own may name images: by path, with the folder's name, by file name, without ending.

    Args:
        path: folder of the images.
        depth: number of folders around the class folders, see `count_wrappers`.
    """
    return [
        lambda parts: "/".join(parts),
        lambda parts: "/".join(parts[depth:]),
        lambda parts: "/".join((path.name, *parts)),
        lambda parts: parts[-1],
        lambda parts: os.path.splitext(parts[-1])[0],
    ]


def _label_by_table(
    path: Path, names: Sequence[str], table: Table, keys: Sequence[Key], depth: int, options: LabelOptions
) -> Labels:
    """Return the labels of images in a table, named by the first of `keys` that finds most of them.

    Raises:
        UserError: an image is not in the table, or labels are neither class indices nor names.
    """
    images = [split_parts(name) for name in names]
    best: list[str] = []
    most = -1
    for key in keys:
        found = [key(parts) for parts in images]
        count = sum(name in table.labels for name in found)
        if count > most and len(set(found)) == len(found):
            best, most = found, count
        if most == len(names):
            break
    if not best:
        twice, _ = Counter("/".join(parts) for parts in images).most_common(1)[0]
        raise UserError(f"{path} holds the image {twice} twice: pack it again")
    _check_complete(path, best, table, options)
    labels, class_names = number_labels([table.labels[name] for name in best], table.where)
    empty = len(class_names) - len(set(labels))
    gaps = f", {empty} of them without images" if empty else ""
    rank_zero_info(f"{table.where}: {len(class_names)} classes{gaps}; to take folders, set {options.typed(FOLDERS)}")
    return Labels(labels, class_names, depth, table.where)


def _check_complete(path: Path, names: Sequence[str], table: Table, options: LabelOptions) -> None:
    """Raise a UserError if images are not in the table; warn of entries without an image."""
    missing = [name for name in names if name not in table.labels]
    if missing:
        message = f"{len(missing)} of {len(names)} images of {path} are not in {table.where}, the first is {missing[0]}"
        entry = next(iter(table.labels))
        raise UserError(f"{message} (the first entry is {entry}); add them, or set {options.typed(FOLDERS)}")
    unused = sorted(set(table.labels) - set(names))
    if unused:
        entries = f"{len(unused)} of {len(table.labels)} entries of {table.where} have no image in {path}"
        rank_zero_info(f"warning: {entries}, the first is {unused[0]}")


def number_labels(values: Sequence[object], where: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return labels and class names: integers are class indices, names are sorted.

    Args:
        values: the label of each image, all int or all str; with integers there are max + 1 classes.
        where: the file, for messages.

    Raises:
        UserError: other values, or an integer below 0 or above MOST_CLASSES.
    """
    kinds = Counter(type(value) for value in values if isinstance(value, int | str) and not isinstance(value, bool))
    kind = kinds.most_common(1)[0][0] if kinds else int
    other = [value for value in values if type(value) is not kind or value == ""]
    if other:
        raise UserError(
            f"{where}: {len(other)} of {len(values)} labels are not all whole numbers or all names, the first is "
            f"{other[0]!r}"
        )
    if kind is str:
        class_names = tuple(sorted(set(values)))
        class_hash(class_names)  # refuses names that cannot be displayed
        rank = {name: label for label, name in enumerate(class_names)}
        return tuple(rank[value] for value in values), class_names
    outside = [value for value in values if not 0 <= value < MOST_CLASSES]
    if outside:
        raise UserError(
            f"{where}: {len(outside)} of {len(values)} labels are not from 0 to {MOST_CLASSES - 1}, the first is "
            f"{outside[0]}"
        )
    return tuple(values), tuple(map(str, range(max(values) + 1)))


def _name_samples(path: Path, images: ArchiveIndex, others: ArchiveIndex) -> None:
    """Warn of labels beside each image as webdataset writes them, which are not read here."""
    stems = {os.path.splitext(name)[0] for name in others.names if os.path.splitext(name)[1] in SAMPLES}
    if not stems:
        return
    beside = [name for name in images.names if os.path.splitext(name)[0] in stems]
    if beside:
        rank_zero_info(
            f"warning: {path}: {len(beside)} images have a label file of webdataset ({' or '.join(SAMPLES)}) beside "
            f"them, the first is {beside[0]}; these labels are read by --data HubDataset --data.path webdataset "
            f"--data.files {path}"
        )
