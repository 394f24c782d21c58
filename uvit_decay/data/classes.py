"""Named lists of classes, such as the 100 synsets of an ImageNet-100; each is a file in class_lists/."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from uvit_decay.runtime.errors import UNPRINTABLE, UserError
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.plain import read_text

_LISTS = Path(__file__).parent / "class_lists"


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
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if name in lines:
            raise UserError(f"{path}: class {name} is in lines {lines[name]} and {number}; take one of them out")
        lines[name] = number
    if not lines:
        raise UserError(f"{path}: no class in it; put one a line")
    return tuple(sorted(lines))


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
