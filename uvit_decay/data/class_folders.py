"""Classes of images by their folders: the first level, as torchvision's ImageFolder reads them, or the lowest one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from uvit_decay.runtime.errors import UserError

SPLITS = ("train", "val", "valid", "validation", "test")  # names of trees of images, each with all classes

Folder = tuple[str, ...]  # a folder as its parts; () is the top


def split_parts(name: str) -> Folder:
    """Return the parts of a name with '/' between them, without '.' and a '/' at the beginning."""
    return tuple(part for part in PurePosixPath(name).parts if part != "/")


def folders_of(names: Sequence[str]) -> dict[str, Folder]:
    """Return the parts of each folder with images, by the folder's name in front of the last '/'."""
    return {folder: split_parts(folder) for folder in {name.rpartition("/")[0] for name in names}}


def count_wrappers(folders: Collection[Folder]) -> int:
    """Return the number of folders around the class folders, such as the one that an archive was packed with.

    A wrapper holds no image itself, and neither does its only subfolder with images: that subfolder would be a class.
    """
    depth = 0
    while True:
        inner = {folder[: depth + 1] for folder in folders}
        (first, *others) = inner
        if others or len(first) == depth or first in folders:
            return depth
        depth += 1


def first_level(path: Path, folders: Collection[Folder], depth: int) -> dict[Folder, str]:
    """Return the class of each folder: the name of its part below `depth` wrappers, or "" for images without classes.

    Raises:
        UserError: there are images both in and beside class folders.
    """
    inside = sorted(folder for folder in folders if len(folder) > depth)
    if inside and len(inside) < len(folders):
        raise UserError(
            f"{path}: images both at the top and in {'/'.join(inside[0])} below it; put all images into class folders, "
            "or none"
        )
    return {folder: folder[depth] if inside else "" for folder in folders}


def lowest_level(path: Path, folders: Collection[Folder]) -> dict[Folder, str]:
    """Return the class of each folder: its own name, or "" for images at the top.

    Raises:
        UserError: a folder with images is inside another one, or two folders have the same name.
    """
    seen: dict[str, str] = {}
    for folder in sorted(folders):
        name = "/".join(folder)
        outer = [folder[:length] for length in range(len(folder)) if folder[:length] in folders]
        if outer:
            place = f"in {'/'.join(outer[-1])}" if outer[-1] else "at the top"
            raise UserError(
                f"{path}: images both {place} and in {name} below it; put all images into class folders, or none"
            )
        if folder and folder[-1] in seen:
            twin = seen[folder[-1]]
            raise UserError(f"{path}: two folders for one class, {twin} and {name}; give only one of the trees")
        if folder:
            seen[folder[-1]] = name
    return {folder: folder[-1] if folder else "" for folder in folders}


def check_splits(path: Path, folders: Collection[Folder], depth: int, option: str) -> None:
    """Raise a UserError if several folders of the first level are splits of a data set, such as train and val.

    A single such name may be a class: a train is one in CIFAR-100.
    """
    heads = {folder[: depth + 1] for folder in folders}
    splits = sorted("/".join(head) for head in heads if head and head[-1].lower() in SPLITS)
    if len(splits) > 1:
        raise UserError(
            f"{path}: {', '.join(splits)} are splits of a data set, not classes; give one of them as the path, or set "
            f"{option} to make them classes"
        )
