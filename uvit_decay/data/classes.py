"""Classes: their names in words, numbers by name, lists and hashes; and the classes of images by their folders.

Imports no torch. The words come from timm, which is imported only if a class name is a WordNet id.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from uvit_decay.files.validation import read_text
from uvit_decay.files.writing import at_home
from uvit_decay.terminal.errors import UNPRINTABLE, UserError
from uvit_decay.terminal.typed import check_types

if TYPE_CHECKING:
    from timm.data import ImageNetInfo

WORDNET = re.compile(r"n\d{8}")
NUMBER = re.compile(r"-?\d+")
SHOWN = 5  # classes that an error lists


def synonyms(name: str) -> tuple[str, ...]:
    """Return the words for a class: "tench" and "Tinca tinca" for the WordNet id n01440764, otherwise its name.

    A name may itself be a list of words, separated by ", ".
    """
    if WORDNET.fullmatch(name):
        with suppress(KeyError):  # it is not an ImageNet noun
            name = _wordnet().label_name_to_description(name)
    return tuple(name.split(", "))


def in_words(names: Sequence[str]) -> tuple[str, ...]:
    """Return the first word for each class, followed by the class name if several classes have this word."""
    words = [synonyms(name)[0] for name in names]
    counts = Counter(words)
    for i, name in enumerate(names):
        if counts[words[i]] > 1:
            words[i] = f"{words[i]} {name}"
    return tuple(words)


def class_numbers(wanted: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the numbers of classes that are given by number, by name or by one of their words in any case.

    Class folders may be named by numbers, which are sorted as text: their names come first.
    """
    return [_find_number(word, names) for word in wanted]


def _find_number(word: str, names: Sequence[str]) -> int:
    if NUMBER.fullmatch(word):
        if word in names:
            return names.index(word)
        number = int(word)
        if not 0 <= number < len(names):
            raise UserError(f"`classes` {word}: this checkpoint has the classes 0 to {len(names) - 1}")
        return number
    found = []
    known: set[str] = set()
    for number, name in enumerate(names):
        words = {called.casefold() for called in (name, *synonyms(name))}
        if word.casefold() in words:
            found.append(number)
        known |= words
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{number} ({names[number]})" for number in found)
        raise UserError(f"`classes` {word}: {len(found)} classes have this name: {listed}; give the number")
    close = get_close_matches(word.casefold(), sorted(known), SHOWN)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"its classes are {', '.join(in_words(names)[:SHOWN])} ..."
    raise UserError(f"`classes` {word}: this checkpoint has no class of this name or number; {hint}")


@cache
def _wordnet() -> ImageNetInfo:
    from timm.data import ImageNetInfo  # takes seconds to import

    return ImageNetInfo()


_LISTS = Path(__file__).parent / "class_lists"


@check_types
def class_list(name_or_path: str | Path) -> tuple[str, ...]:
    """Return the sorted classes of a list, in the order of class folders; see `ordered_class_list`."""
    return tuple(sorted(ordered_class_list(name_or_path)))


def ordered_class_list(name_or_path: str | Path) -> tuple[str, ...]:
    """Return the classes of a bundled list ("imagenet-100/cmc") or of a text file, in its order.

    Bundled lists are sorted. A file has one class per line; blank lines and lines that begin with # are ignored.
    """
    bundled = {}
    for file in _LISTS.rglob("*.txt"):
        name = file.relative_to(_LISTS).with_suffix("")
        bundled[name.as_posix()] = file
    path = bundled.get(str(name_or_path), at_home(name_or_path))
    if not os.path.exists(path):
        known = ", ".join(sorted(bundled))
        raise UserError(f"{name_or_path}: neither a text file nor a bundled class list; give a file or one of {known}")
    text = read_text(path, 2**24).removeprefix("\ufeff")  # the byte order mark of Windows editors
    names = []
    for line in text.splitlines():
        name = line.strip()
        if name and not name.startswith("#"):
            names.append(name)
    if not names:
        raise UserError(f"{path}: the file contains no classes; write one per line")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise UserError(f"{path}: the class {name} is on {times} lines; remove all but one")
    return tuple(names)


def class_hash(class_names: Sequence[str]) -> str:
    """Return the SHA-256 of the names in order, joined by newlines: equal only for equal lists.

    Raises:
        UserError: a name is empty, is not valid UTF-8, or contains a control character. Reports could not display it,
            and with line breaks two different lists could share a hash.
    """
    for name in class_names:
        if not name or UNPRINTABLE.search(name):
            reason = "it is empty, is not valid UTF-8 or contains control characters"
            raise UserError(f"cannot use the class name {name!r}: {reason}; rename its folder")
    return sha256("\n".join(class_names).encode()).hexdigest()


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
    """Return the class of each folder: its part below `depth` wrappers, or "" for images without classes."""
    inside = sorted(folder for folder in folders if len(folder) > depth)
    if inside and len(inside) < len(folders):
        raise UserError(
            f"{path}: images both at the top and in {'/'.join(inside[0])} below it; put all images into class folders, "
            "or none"
        )
    return {folder: folder[depth] if inside else "" for folder in folders}


def lowest_level(path: Path, folders: Collection[Folder]) -> dict[Folder, str]:
    """Return the class of each folder: its own name, or "" for images at the top."""
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


def compose(name: str) -> str:
    """Return a name in Unicode's composed form (NFC); macOS writes the names of files decomposed (NFD)."""
    return unicodedata.normalize("NFC", name)


def merge_spellings(names: Collection[str]) -> dict[str, str]:
    """Return the class of each name: its composed form if several names have the same one, otherwise the name itself.

    A single spelling stays as it is, because runs and checkpoints know their classes by it.
    """
    counts = Counter(compose(name) for name in names)
    classes = {}
    for name in names:
        is_single = counts[compose(name)] == 1
        classes[name] = name if is_single else compose(name)
    return classes
