"""Options of runs by short names, and runs grouped by the values of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from uvit_decay.compare.runs import Run
from uvit_decay.runtime.errors import UserError


def find_option(runs: Sequence[Run], name: str, flag: str = "--by") -> str:
    """Return the full name of an option, given by its last part or parts; all runs must have it."""
    ending = name.replace(".init_args", "")
    names = {name for run in runs for name in run.options}
    found = sorted({ending} & names or {name for name in names if name.endswith(f".{ending}")})
    if not found:
        raise UserError(f"{flag} {name}: the configurations have no such option; model.net.alpha_min is one")
    if len(found) > 1:
        raise UserError(f"{flag} {name} may be {', '.join(found)}: name one of them")
    for run in runs:
        if found[0] not in run.options:
            raise UserError(f"{flag} {name}: the configuration of {run.folder} has no {found[0]}")
    return found[0]


def grouped_by(runs: Sequence[Run], options: Sequence[str]) -> dict[tuple[str, ...], list[Run]]:
    """Group runs by the values of one option or several, in the order of `grouped`, of the further ones ascending."""
    if not options:
        return {(): list(runs)}
    *outer, last = options
    return {
        (*labels, label): members
        for labels, group in grouped_by(runs, outer).items()
        for label, members in grouped(group, last, ascending=bool(outer)).items()
    }


def grouped(runs: Sequence[Run], option: str, ascending: bool = False) -> dict[str, list[Run]]:
    """Group runs by the value of an option, in descending order: the paper's tables begin with the plain network."""

    def place(run: Run) -> tuple[bool, float | int, str]:
        value = run.options[option]
        if not is_number(value):
            return True, 0.0, str(value)
        return False, value if ascending else -value, ""

    return by_key(sorted(runs, key=place), lambda run: str(run.options[option]))


def is_number(value: object) -> bool:
    """Return whether an option is a number, and not true or false."""
    return type(value) in (int, float)


def by_key(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    """Group runs by a key, in the order of their first occurrence."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
