"""The kinds of files in a folder or archive by their extensions: images that are read, other pictures, and the rest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence

from PIL import Image

from uvit_decay.data.archives import Kinds
from uvit_decay.data.decoding import formats

HEIF = (".heic", ".heics", ".heif", ".heifs", ".hif")  # read where pillow-heif is installed
MOST_KINDS = 5  # extensions in a message


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


def is_heif(name: str) -> bool:
    """Return whether the name of an image ends as HEIF's do."""
    return name.lower().endswith(HEIF)


def _join_counts(kinds: Sequence[tuple[str, int]]) -> str:
    named = [f"{count:,} {kind or 'without an extension'}" for kind, count in kinds[:MOST_KINDS]]
    more = sum(count for _, count in kinds[MOST_KINDS:])
    if more:
        named.append(f"{more:,} more")
    return ", ".join(named)
