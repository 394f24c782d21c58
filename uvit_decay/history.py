"""Histories of a run: probes.jsonl and generation.jsonl in its folder, one line of JSON for each measurement.

{"step": 500, "epoch": 11.36, "images_seen": 16000, "values": {"fd": 12.3}, "metadata": {"n": 1000, ...}}
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.files import replacing
from uvit_decay.runtime.validation import parse, read_text, typed

PROBES, GENERATION = "probes.jsonl", "generation.jsonl"
CHECKPOINTS = "checkpoints"  # folder beside them
METRICS = "metrics.csv"  # all logged numbers, which is no history of this format
LARGEST, LARGEST_LOG = 2**28, 2**30  # bytes of a history, and of all logged numbers


@dataclass(frozen=True)
class Measurement:
    """Results of one evaluation during training.

    Args:
        step: optimizer steps before it.
        epoch: passes over the training images before it, with fractions.
        images_seen: training images before it, over all devices.
        values: the results by name; NaN and infinity are written as null, which is read as NaN.
        metadata: everything that the values depend on besides the step, as plain values.
    """

    step: int
    epoch: float
    images_seen: int
    values: dict[str, float | None]
    metadata: dict[str, object]


def read(path: Path) -> list[Measurement]:
    """Read a history in the order of its steps; it is empty if there is no such file.

    Raises:
        UserError: a line that is not a measurement, or two of one step; the message names it.
    """
    if not path.exists():
        return []
    lines = read_text(path, LARGEST).splitlines()
    found: dict[int, Measurement] = {}
    for number, line in enumerate(lines, 1):
        measurement = _measurement(line, f"{path}, line {number}")
        if found.setdefault(measurement.step, measurement) is not measurement:
            raise UserError(f"{path}, line {number}: a second measurement of step {measurement.step}; remove one")
    return [found[step] for step in sorted(found)]


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a metrics.csv, each with its step and the numbers that it has; none if there is no such file.

    Raises:
        UserError: the file is damaged, which half a line at its end is not.
    """
    whole_lines = read_text(path, LARGEST_LOG).rpartition("\n")[0] if path.exists() else ""
    with explained(f"{path} is damaged", ValueError, TypeError, LookupError, csv.Error):
        for row in csv.DictReader(whole_lines.splitlines()):
            if None in row:
                raise ValueError(f"the row of step {row['step']} has more cells than the header")
            yield int(row["step"]), {name: value for name, value in row.items() if value and name != "step"}


def _measurement(line: str, where: str) -> Measurement:
    measurement = typed(Measurement, parse(line, where), where)
    values = {name: math.nan if value is None else value for name, value in measurement.values.items()}
    return replace(measurement, values=values)


def append(path: Path, measurement: Measurement) -> None:
    """Add a measurement to a history, which a killed run leaves whole: the file is replaced.

    Measurements of this step or later are dropped: they are of a run that was continued from an earlier step.
    """
    _write(path, [*(earlier for earlier in read(path) if earlier.step < measurement.step), measurement])


def copy_until(step: int, source: Path, target: Path) -> None:
    """Begin a history with the measurements of another one up to a step, those of the run that this one continues."""
    if earlier := [measurement for measurement in read(source) if measurement.step <= step]:
        _write(target, earlier)


def _write(path: Path, measurements: list[Measurement]) -> None:
    with replacing(path) as file:
        for measurement in measurements:  # null stands for NaN and infinity, which JSON does not have
            values = {name: value if math.isfinite(value) else None for name, value in measurement.values.items()}
            file.write(f"{json.dumps({**asdict(measurement), 'values': values})}\n".encode())


def run_of(checkpoint: str | Path) -> Path | None:
    """Return the folder of the run that wrote a checkpoint, None if it is not known.

    LastCheckpoint writes to `checkpoints` in the run folder.
    """
    folder = Path(checkpoint).parent
    return folder.parent if folder.name == CHECKPOINTS else None
