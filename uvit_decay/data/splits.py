"""Parts of a data set: the folders train and test, known by their names, and images that are held out at random."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from uvit_decay.data.classes import Folder, count_wrappers
from uvit_decay.runtime.random import generator
from uvit_decay.terminal.errors import UserError

# Words that tell what a folder holds. The first kind with a word in the name of a folder counts.
MASKS, TRAINING, VALIDATION, TEST, PREDICTED, IMAGES = "masks", "training", "validation", "test", "predicted", "images"
WORDS = {
    MASKS: "mask masks annotation annotations groundtruth gt label labels trimap trimaps segmentation segmentations",
    TRAINING: "train training trn trainval",
    VALIDATION: "val valid validation dev eval",
    TEST: "test testing tst",
    PREDICTED: "pred predict prediction",
    IMAGES: "image images img imgs picture pictures photo photos jpegimages",
}
KIND_OF = {word: kind for kind, words in WORDS.items() for word in words.split()}
TESTING = (VALIDATION, TEST, PREDICTED)  # the first of these that there is has the test images
NEUTRAL = ("dataset", "data", "set", "split", "class", "object", "png", "jpg", "jpeg")  # words that tell nothing


@dataclass(frozen=True)
class Parts:
    """Folders of a data set, each with all its classes.

    Args:
        training: the folder of the training images.
        testing: folders that may have the test images, the best one first.
    """

    training: Folder
    testing: tuple[Folder, ...]


def find_parts(path: Path, folders: Collection[Folder]) -> Parts | None:
    """Return the parts of a data set; None if its folders are classes.

    They are parts if every folder of the first level is named by a split, such as seg_train or test2017, and there is
    at least one for training and one for testing. Some such folders beside others, as train and val beside extra, are
    neither.

    Args:
        path: the folder or archive of the data set, for messages.
        folders: all folders with images in it.
    """
    depth = count_wrappers(folders)
    if any(len(folder) == depth for folder in folders):  # images beside the folders
        return None
    around = next(iter(folders))[:depth]
    first_level = {folder[depth] for folder in folders}
    kinds = read_kinds(first_level)
    names = sorted(kinds, key=lambda name: (list(WORDS).index(kinds[name]), name))
    present = set(kinds.values())
    as_classes = "or set `labels` folders to take all of them as classes"
    if MASKS in present and len(present) > 1:
        masks = [name for name in names if kinds[name] == MASKS]
        others = [name for name in names if kinds[name] != MASKS]
        what = f"{', '.join(masks)} beside {', '.join(others)} is no class"
        raise UserError(f"{path}: {what}; {_advise(path, (*around, others[0]))}, {as_classes}")
    if not are_splits(kinds.values()):
        if splits := name_splits(first_level):
            what = f"{', '.join(splits)} are splits of a data set, not classes"
            raise UserError(f"{path}: {what}; {_advise(path, (*around, splits[0]))}, {as_classes}")
        return None
    training = [name for name in names if kinds[name] == TRAINING]
    if len(training) > 1:
        what = f"{', '.join(training)} are all for training"
        raise UserError(f"{path}: {what}; {_advise(path, (*around, training[0]))}, {as_classes}")
    testing = [(*around, name) for name in names if kinds[name] in TESTING]
    return Parts((*around, training[0]), tuple(testing))


def _advise(path: Path, folder: Folder) -> str:
    """Return what to give instead of a data set to read only one of its folders."""
    if path.is_dir():
        return f"give {path.joinpath(*folder)}"
    return f"unpack it and give its folder {'/'.join(folder)}"


def read_kinds(names: Collection[str]) -> dict[str, str]:
    """Return the kind of each folder in WORDS; empty if one has no word of a kind, or if their other words differ.

    train_images and test_images have the same other words, and so have seg_train and seg_test, but not train_station
    and test_tube.
    """
    kinds = {}
    rests = set()
    for name in names:
        spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)  # trainA, TestSet
        joined = re.sub(r"ground[ _-]truth", "groundtruth", spaced.lower())
        words = [_strip_neutral(word) for word in re.findall(r"[^\W\d_]+", joined)]
        found = {KIND_OF[word] for word in words if word in KIND_OF}
        if not found:
            return {}
        kinds[name] = next(kind for kind in WORDS if kind in found)
        rests.add(tuple(word for word in words if word not in KIND_OF and len(word) > 1))
    return kinds if len(rests) == 1 else {}


def are_parts(names: Collection[str]) -> bool:
    """Return whether `find_parts` does not take folders of these names for classes."""
    kinds = read_kinds(names).values()
    return are_splits(kinds) or (MASKS in kinds and len(set(kinds)) > 1) or bool(name_splits(names))


def are_splits(kinds: Collection[str]) -> bool:
    """Return whether folders of these kinds are the parts of a data set."""
    present = set(kinds)
    return TRAINING in present and present <= {TRAINING, *TESTING} and len(present) > 1


def name_splits(names: Collection[str]) -> list[str]:
    """Return the names that are a word for training, validation or test images, if there are several of these kinds."""
    order = (TRAINING, VALIDATION, TEST)
    kinds = {}
    for name in sorted(names):
        if KIND_OF.get(name.lower()) in order:
            kinds[name] = KIND_OF[name.lower()]
    if len(set(kinds.values())) < 2:
        return []
    return sorted(kinds, key=lambda name: order.index(kinds[name]))


def _strip_neutral(word: str) -> str:
    """Return a word without a neutral one at its end: "train" for "trainset", "" for "set"."""
    for neutral in NEUTRAL:
        if word.endswith(neutral):
            rest = word.removesuffix(neutral)
            if not rest or rest in KIND_OF:
                return rest
    return word


def hold_out(labels: Sequence[int], share: float) -> tuple[list[int], list[int]]:
    """Return the sorted indices of training images and of held-out images, the same share of every class.

    Args:
        labels: the class of each image.
        share: of each class, in (0, 1).
    """
    numbers = np.array(labels)
    held_out: list[int] = []
    for label in np.unique(numbers):
        members = np.flatnonzero(numbers == label)
        shuffled = torch.randperm(len(members), generator=generator("holdout", int(label))).numpy()
        count = round(share * len(members))
        held_out += members[shuffled[:count]].tolist()
    training = sorted(set(range(len(numbers))) - set(held_out))
    if not training or not held_out:
        count = f"holds out {len(held_out)} of {len(numbers)} images, the same share of each class"
        raise UserError(
            f"{share:g} {count}; set another share, or give test images with `test_path`", argument="holdout"
        )
    return training, sorted(held_out)
