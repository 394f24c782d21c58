"""Suggestions for mistyped words: an option, a command or a class that is like the word that was given."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

# Options of other programs and the last parts of ours that mean the same, the best one first.
ALIASES = {
    "bs": ("batch-size",),
    "cfg": ("config", "guidance"),
    "cfg-scale": ("guidance",),
    "checkpoint": ("ckpt", "ckpt-path"),
    "epochs": ("max-epochs",),
    "gpus": ("devices",),
    "iterations": ("max-steps",),
    "learning-rate": ("lr",),
    "output": ("out",),
    "resume": ("ckpt-path",),
    "steps": ("max-steps",),
    "wd": ("weight-decay",),
    "workers": ("num-workers",),
}
MOST = 2  # suggestions at once, and letters by which a typing error makes a word longer or shorter


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the known words that are like `word`; empty if none is like it."""
    found = closest(word, known)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that a user probably meant, at most two; a poor match is left out.

    These are the same word in another case, or words that are spelled alike. Of options, the last parts are compared:
    first equal ones (`--lr` for `--model.optim.lr`), then those of the same meaning (ALIASES), then those spelled
    alike. If there are none, the options that begin with `word` are meant (`--batch` for `--batch-size`).
    """
    wanted = _plain(word)
    names = {_plain(name): name for name in known}
    if wanted in names:
        return [names[wanted]]
    find = _find_options if word.startswith("-") else _find_typos
    return [names[name] for name in find(wanted, list(names))[:MOST]]


def _find_options(wanted: str, names: list[str]) -> list[str]:
    """Return the plain names of the options that were probably meant by the plain name `wanted`."""
    last = _last(wanted)
    meanings = [[alias] for alias in ALIASES.get(last, ())]
    for likely in ([last], *meanings, _find_typos(last, map(_last, names))):
        found = [name for name in names if _last(name) in likely]
        if found:
            return _in_group(wanted, found)
    return [name for name in names if len(wanted) > 2 and name.startswith(wanted)]


def _find_typos(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that are spelled like `word`, in their order."""
    near = [other for other in dict.fromkeys(known) if abs(len(other) - len(word)) <= MOST]
    # A swap of letters keeps 2/3 of a word of three letters, and 3/4 of one of four.
    close = get_close_matches(word, near, MOST, cutoff=0.66 if len(word) == 3 else 0.75)
    return [other for other in near if other in close and len(word) > 2]


def _in_group(wanted: str, names: list[str]) -> list[str]:
    """Return the names that begin with the same part as `wanted`, such as "data." of data.bs; all if none does."""
    group = wanted.partition(".")[0] + "."
    return [name for name in names if name.startswith(group)] or names


def _plain(word: str) -> str:
    """Return a word without leading hyphens and its value, in lower case, with hyphens for underscores."""
    return re.sub("=.*", "", word).lstrip("-").lower().replace("_", "-")


def _last(name: str) -> str:
    return name.rpartition(".")[2]
