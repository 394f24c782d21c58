"""Tables of what tests of faults and of hostile files found, printed at the end of their run: `make faults`.

A test calls `record_property("fault", {...})` or `record_property("fuzz", {...})` with the columns below, before it
asserts. Rows of the same first column become one: counts are added, and of measurements the largest is shown.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

COLUMNS = {  # the key of rows, what is added, and what is shown as the largest value
    "fault": (["fault"], ["tries", "survived"], ["steps lost", "seconds to the end"]),
    "fuzz": (["file"], ["cases", "as written", "another valid", "refused"], ["slowest ms", "peak MB"]),
}


def merged(kind: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a table, one for each key, in the order of their first appearance."""
    (key,), added, largest = COLUMNS[kind]
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = table.setdefault(row[key], {key: row[key]})
        known |= {name: known.get(name, 0) + row[name] for name in added}
        known |= {name: max(known.get(name, 0), row[name]) for name in largest if row.get(name) is not None}
    return list(table.values())


def markdown(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table, with a last row of sums."""
    (key,), added, largest = COLUMNS[kind]
    total = {key: "all", **{name: sum(row[name] for row in rows) for name in added}}
    total |= {name: max((row[name] for row in rows if name in row), default="") for name in largest}
    names = [key, *added, *largest]
    lines = [f"| {' | '.join(names)} |", f"| --- {'| ---: ' * (len(names) - 1)}|"]
    return lines + [f"| {' | '.join(_shown(row.get(name, '')) for name in names)} |" for row in [*rows, total]]


def _shown(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def report(terminal: pytest.TerminalReporter) -> None:
    """Print the tables that have rows."""
    found = [item for reports in terminal.stats.values() for item in reports if isinstance(item, pytest.TestReport)]
    properties = [pair for item in found if item.when == "call" for pair in item.user_properties]
    for kind in COLUMNS:
        if rows := merged(kind, (row for name, row in properties if name == kind)):
            machine = f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}"
            terminal.write_line(f"\n{kind}, {machine}\n")
            for line in markdown(kind, rows):
                terminal.write_line(line)
