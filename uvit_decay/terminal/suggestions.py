"""Suggestions for mistyped words: an option, a command or a class that is spelled like the word that was given."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

MOST = 2  # suggestions at once
LEAST = 0.66  # share of letters in common; a swap of letters keeps 2/3 of a word of three


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the known words that are like `word`; empty if none is like it."""
    found = closest(word, known)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that are spelled like `word`, at most two, the nearest one first.

    The last parts of dotted names are compared first: --lr is --model.optim.lr.
    """
    wanted = _plain(word)
    names = {_plain(name): name for name in known}
    if wanted in names:
        return [names[wanted]]
    last_parts = dict.fromkeys(map(_last, names))
    near = get_close_matches(_last(wanted), last_parts, 1, LEAST)
    found = [name for name in names if _last(name) in near]
    return [names[name] for name in get_close_matches(wanted, found, MOST, 0)]


def _plain(word: str) -> str:
    """Return a word without leading hyphens and its value, in lower case, with hyphens for underscores."""
    return re.sub("=.*", "", word).lstrip("-").lower().replace("_", "-")


def _last(name: str) -> str:
    return name.rpartition(".")[2]
