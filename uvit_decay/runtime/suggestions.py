"""Suggestions for mistyped words: an option, a command or a class that is like the word that was given."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
MOST = 2  # suggestions at once


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the known words that are like `word`; empty if none is like it."""
    found = closest(word, known)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that a user probably meant, at most two; a poor match is left out.

    These are the same word in another case, else a typing error away, else, for options, of the same last part (`--lr`
    for `--model.optim.lr`), of the same meaning (ALIASES), or longer (`--batch` for `--batch-size`).
    """
    wanted = _plain(word)
    names = {_plain(name): name for name in known}
    if wanted in names:
        return [names[wanted]]
    typos = {name: _edits(wanted, name) for name in names}
    fewest = min(typos.values(), default=len(wanted))
    if fewest <= _most_edits(wanted):
        return [names[name] for name, edits in typos.items() if edits == fewest][:MOST]
    if not word.startswith("-"):
        return []
    for last in (_last(wanted), *ALIASES.get(_last(wanted), ())):
        same = [name for name in names if _last(name) == last]
        if same:
            return [names[name] for name in _in_group(wanted, same)[:MOST]]
    longer = [name for name in names if len(wanted) > 2 and name.startswith(wanted)]
    return [names[name] for name in longer[:MOST]]


def _in_group(wanted: str, names: list[str]) -> list[str]:
    """Return the names that begin with the same part as `wanted`, such as "data." of data.bs; all if none does."""
    group = wanted.partition(".")[0] + "."
    return [name for name in names if name.startswith(group)] or names


def _plain(word: str) -> str:
    """Return a word without leading hyphens and its value, in lower case, with hyphens for underscores."""
    return re.sub("=.*", "", word).lstrip("-").lower().replace("_", "-")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _most_edits(word: str) -> int:
    """Return how many typing errors a word of this length may have."""
    if len(word) < 3:
        return 0
    return 1 if len(word) < 8 else 2


def _edits(a: str, b: str) -> int:
    """Return the fewest letters to insert, delete, replace or swap with the next one that turn `a` into `b`."""
    rows = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
