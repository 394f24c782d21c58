"""Names of classes for people: WordNet ids, as ImageNet's classes are called, in words; classes by their names.

Imports no torch; the words are those of timm, which is imported only where a class has such an id.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from uvit_decay.runtime.errors import UNPRINTABLE, UserError
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.validation import read_text

if TYPE_CHECKING:
    from timm.data import ImageNetInfo

WORDNET = re.compile(r"n\d{8}")
NUMBER = re.compile(r"-?\d+")
SHOWN = 5  # classes that an error lists


def synonyms(name: str) -> tuple[str, ...]:
    """Return the words for a class: of the WordNet id n01440764 "tench" and "Tinca tinca", else its name.

    A name may itself be a list of words, separated by ", ".
    """
    if WORDNET.fullmatch(name):
        with suppress(KeyError):  # it is none of a noun of ImageNet's
            name = _wordnet().label_name_to_description(name)
    return tuple(name.split(", "))


def in_words(names: Sequence[str]) -> tuple[str, ...]:
    """Return the first word for each class; with its name, too, if another class is called the same."""
    words = [synonyms(name)[0] for name in names]
    counts = Counter(words)
    return tuple(f"{word} {name}" if counts[word] > 1 else word for word, name in zip(words, names, strict=True))


def class_numbers(wanted: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the numbers of the classes that are given by number, by name or by one of their words in any case.

    Raises:
        UserError: a class that does not exist, or a word for several.
    """
    return [_number(word, names) for word in wanted]


def _number(word: str, names: Sequence[str]) -> int:
    if NUMBER.fullmatch(word):
        if not 0 <= int(word) < len(names):
            raise UserError(f"--classes {word}: this checkpoint has the classes 0 to {len(names) - 1}")
        return int(word)
    words = [{called.casefold() for called in (name, *synonyms(name))} for name in names]
    found = [number for number, own in enumerate(words) if word.casefold() in own]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{number} ({names[number]})" for number in found)
        raise UserError(f"--classes {word}: {len(found)} classes are called so, give a number: {listed}")
    close = get_close_matches(word.casefold(), sorted(set().union(*words)), SHOWN)
    hint = f"did you mean {' or '.join(close)}?" if close else f"but {', '.join(in_words(names)[:SHOWN])} ..."
    raise UserError(f"--classes takes numbers, or names of the checkpoint's classes: it has no {word!r}, {hint}")


@cache
def _wordnet() -> ImageNetInfo:
    from timm.data import ImageNetInfo  # takes seconds to import

    return ImageNetInfo()


_LISTS = Path(__file__).parent / "data" / "class_lists"


def class_list(name_or_path: str | Path) -> tuple[str, ...]:
    """Return the sorted classes of a bundled list ("imagenet-100/cmc") or of a text file.

    A file has one class per line, each once; blank lines and lines that begin with # are ignored.
    """
    files = {file.relative_to(_LISTS).with_suffix("").as_posix(): file for file in _LISTS.rglob("*.txt")}
    path = files.get(str(name_or_path), at_home(name_or_path))
    if not os.path.exists(path):
        known = ", ".join(sorted(files))
        raise UserError(f"{name_or_path}: neither a text file nor a class list, which are {known}")
    text = read_text(path, 2**24).removeprefix("\ufeff")  # the byte order mark of Windows editors
    names = [name for name in map(str.strip, text.splitlines()) if name and not name.startswith("#")]
    if not names:
        raise UserError(f"{path}: no class in it; put one a line")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise UserError(f"{path}: class {name} is in {times} lines; leave one of them")
    return tuple(sorted(names))


def class_hash(class_names: Sequence[str]) -> str:
    """Return the SHA-256 of the names in order, joined by newlines: equal only for equal lists.

    Raises:
        UserError: a name is empty, no UTF-8, or contains a control character: reports could not show it, and of a line
            end, different lists would have the same hash.
    """
    for name in class_names:
        if not name or UNPRINTABLE.search(name):
            raise UserError(f"the class name {name!r} is empty, no UTF-8 or has control characters: rename its folder")
    return sha256("\n".join(class_names).encode()).hexdigest()
