"""Labels of images: from a table of names and labels, or from their folders.

`find_labels` reads them for everything that lists images: data modules, the encoder of latents and evaluation.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.data.archives import ArchiveIndex, open_members
from uvit_decay.data.classes import (
    Folder,
    class_hash,
    compose,
    count_wrappers,
    first_level,
    folders_of,
    lowest_level,
    merge_spellings,
    split_parts,
)
from uvit_decay.data.label_tables import DATASET, METADATA, Columns, NoLabels, Table, read_table
from uvit_decay.files.writing import at_home
from uvit_decay.terminal.errors import UserError

AUTO = "auto"
FOLDERS = "folders"
LEAF = "leaf"
NO_CLASSES = "null"  # as it is typed
MOST_CLASSES = 100_000  # limit of integer labels
SHARD = re.compile(r"\d{5}/img\d{8}\.png")  # names of images by EDM's and StyleGAN's dataset_tool.py


@dataclass(frozen=True)
class LabelOptions:
    """Source of the labels of images.

    Args:
        source: "auto", "folders", "leaf" or the path of a table; None for images without classes.
        columns: the columns of a table.
        argument: the argument that sets `source`, for messages.
    """

    source: str | None = AUTO
    columns: Columns = Columns()
    argument: str = "labels"


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

    @classmethod
    def none(cls, names: Sequence[str]) -> Labels:
        """Return the labels of images without classes."""
        return cls((0,) * len(names), (), count_wrappers(folders_of(names).values()))

    @classmethod
    def from_folders(cls, path: Path, names: Sequence[str], root: Folder, options: LabelOptions) -> Labels:
        """Return the labels of images in class folders; images at the top have no classes.

        Args:
            path: the folder or archive, for messages.
            names: names of the images.
            root: the folder in it that all images are in, and that is not a class.
            options: where the labels come from.
        """
        folders = {folder: parts[len(root) :] for folder, parts in folders_of(names).items()}
        parts = set(folders.values())
        inner = count_wrappers(parts)
        depth: int | None = len(root) + inner
        if options.source == LEAF:
            depth = None
            class_of = lowest_level(path, parts)
        else:
            class_of = first_level(path, parts, inner)
        spelling = merge_spellings(set(class_of.values()) - {""})
        class_names = tuple(sorted(set(spelling.values())))
        class_hash(class_names)  # refuses names that cannot be displayed
        if options.source == AUTO and any(len(folder) > inner + 1 for folder in parts):
            count = f"{len(class_names)} classes by the folders of the first level"
            rank_zero_info(f"{path}: {count}; to take the lowest folders, set `{options.argument}` {LEAF}")
        if options.source == AUTO and len(class_names) == len(parts) == 1:
            remedy = f"for images without classes, give this folder as the path, or set `{options.argument}` null"
            rank_zero_info(f"{path}: all images are in the folder {class_names[0]}, which is the only class; {remedy}")
        rank = {name: label for label, name in enumerate(class_names)}
        label_of = {}
        for folder, folder_parts in folders.items():
            name = class_of[folder_parts]
            label_of[folder] = rank[spelling[name]] if name else 0
        labels = tuple(label_of[name.rpartition("/")[0]] for name in names)
        return cls(labels, class_names, depth)

    @classmethod
    def from_table(
        cls, path: Path, keys: Sequence[Sequence[str]], table: Table, depth: int, options: LabelOptions
    ) -> Labels:
        """Return the labels of images in a table.

        Args:
            path: the folder or archive, for messages.
            keys: names of the images, in several notations; the first one that finds most of them in the table counts.
            table: the table.
            depth: as in `Labels`.
            options: where the labels come from.
        """
        clear = [notation for notation in keys if len(set(notation)) == len(notation)]
        names = max(clear or keys, key=lambda notation: sum(name in table.labels for name in notation))
        twice, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise UserError(f"{path} holds the image {twice} twice: pack it again")
        _check_complete(path, names, table, options)
        labels, class_names = number_labels([table.labels[name] for name in names], table.where)
        empty = len(class_names) - len(set(labels))
        gaps = f", {empty} of them without images" if empty else ""
        folders = f"to take folders, set `{options.argument}` {FOLDERS}"
        rank_zero_info(f"{table.where}: {len(class_names)} classes{gaps}; {folders}")
        return cls(labels, class_names, depth, table.where)


def find_labels(
    path: Path,
    images: ArchiveIndex,
    others: ArchiveIndex,
    options: LabelOptions,
    found: tuple[Table, int] | None = None,
    root: Folder = (),
) -> Labels:
    """Return the labels of the images in a folder, zip or tar.

    Args:
        path: the folder or archive.
        images: its images.
        others: its files with the extensions of tables.
        options: where the labels come from.
        found: the result of `find_table`, which `auto` prefers to folders.
        root: the folder in it that all images are in, and that is not a class.
    """
    source = options.source
    if source is None:
        return Labels.none(images.names)
    if source == AUTO:
        if found is not None:
            table, level = found
            names = [compose("/".join(split_parts(name)[level:])) for name in images.names]
            return Labels.from_table(path, [names], table, level, options)
        has_dataset = any(split_parts(name)[-1] == DATASET for name in others.names)
        if has_dataset and all(SHARD.fullmatch("/".join(split_parts(name)[-2:])) for name in images.names):
            return Labels.none(images.names)  # the folders are shards of EDM's or StyleGAN's tool, not classes
    elif source not in (FOLDERS, LEAF):
        depth = count_wrappers(folders_of(images.names).values())
        keys = _list_keys(path, images.names, depth)
        table = _open_table(options, {name for notation in keys for name in notation})
        return Labels.from_table(path, keys, table, depth, options)
    return Labels.from_folders(path, images.names, root, options)


def find_table(
    path: Path, folders: Collection[Folder], others: ArchiveIndex, columns: Columns
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
                table = read_table(f"{path}/{others.names[number]}", content, columns)
            except NoLabels as error:
                rank_zero_info(f"{error}: it is not read")
                continue
            return table, level
    return None


def _open_table(options: LabelOptions, images: Collection[str]) -> Table:
    """Return the table in the file that the option names; `images` are the names that it may have for the images."""
    file = at_home(options.source)
    if not os.path.isfile(file):
        kinds = f"{AUTO}, {FOLDERS}, {LEAF}, {NO_CLASSES}, or a table (.json, .jsonl, .csv, .tsv, .txt, .parquet)"
        raise UserError(f"{options.source}: no such file; give {kinds}", argument=options.argument)
    with open_members(file.parent, ArchiveIndex((file.name,))) as fetch:
        return read_table(str(file), fetch(0).getvalue(), options.columns, images)


def _list_keys(path: Path, names: Sequence[str], depth: int) -> list[list[str]]:
    """Return how a table of one's own may name images: by path, with the folder's name, by file name, without ending.

    Args:
        path: folder of the images.
        names: names of the images in it.
        depth: number of folders around the class folders, see `count_wrappers`.
    """
    images = [split_parts(name) for name in names]
    keys = [
        ["/".join(parts) for parts in images],
        ["/".join(parts[depth:]) for parts in images],
        ["/".join((path.name, *parts)) for parts in images],
        [parts[-1] for parts in images],
        [os.path.splitext(parts[-1])[0] for parts in images],
    ]
    return [[compose(name) for name in notation] for notation in keys]


def _check_complete(path: Path, names: Sequence[str], table: Table, options: LabelOptions) -> None:
    """Raise a UserError if images are not in the table; warn of entries without an image."""
    missing = [name for name in names if name not in table.labels]
    if missing:
        message = f"{len(missing)} of {len(names)} images of {path} are not in {table.where}, the first is {missing[0]}"
        entry = next(iter(table.labels))
        remedy = f"add them, set `name_column` if it has them in another column, or `{options.argument}` {FOLDERS}"
        raise UserError(f"{message} (the first entry is {entry}); {remedy}")
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
        spelling = merge_spellings(set(values))
        class_names = tuple(sorted(set(spelling.values())))
        class_hash(class_names)  # refuses names that cannot be displayed
        rank = {name: label for label, name in enumerate(class_names)}
        return tuple(rank[spelling[value]] for value in values), class_names
    outside = [value for value in values if not 0 <= value < MOST_CLASSES]
    if outside:
        count = (
            f"{len(outside)} of {len(values)} labels are not from 0 to {MOST_CLASSES - 1}, the first is {outside[0]}"
        )
        remedy = "write 0 instead of -1" if {*values} == {-1, 1} else "number the classes from 0, or write their names"
        raise UserError(f"{where}: {count}; {remedy}")
    return tuple(values), tuple(map(str, range(max(values) + 1)))
