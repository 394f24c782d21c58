"""Read the tables of a published page, so that figures can be drawn after the runs are gone."""

from __future__ import annotations

import re
from pathlib import Path

Row = dict[str, str]  # title of the column -> cell


def read_tables(page: Path, heading: str) -> list[Row]:
    """Return the rows of all tables between `heading` and the next heading of the same or a higher level."""
    level = heading.split(" ")[0]
    section = page.read_text().partition(f"\n{heading}\n")[2]
    section = re.split(rf"\n#{{2,{len(level)}}} ", section)[0]
    rows: list[Row] = []
    titles: list[str] = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            titles = []
        elif not titles:
            titles = cells
        elif not cells[0].startswith("---"):
            rows.append(dict(zip(titles, cells, strict=True)))
    return rows


def merge_by_arm(rows: list[Row]) -> dict[str, Row]:
    """Return the cells of each arm; the first column names arms as `name` or `name (number of runs)`."""
    arms: dict[str, Row] = {}
    for row in rows:
        first, *others = row.items()
        arm = re.sub(r" \(\d+\)$", "", first[1])
        arms[arm] = {**arms.get(arm, {}), **dict(others)}
    return arms


def parse_cell(cell: str) -> tuple[float, float]:
    """Return mean and standard deviation of `mean (deviation)` or `mean +- deviation`; a single run has 0."""
    numbers = re.findall(r"[\d.]+", cell)
    if len(numbers) == 1:
        return float(numbers[0]), 0.0
    mean, deviation = numbers
    return float(mean), float(deviation)
