"""Histories of a run: probes.jsonl, generation.jsonl, branches.jsonl and metrics.csv in its folder; no Lightning here.

A line of a .jsonl file is a measurement:
{"step": 500, "epoch": 11.36, "images_seen": 16000, "values": {"fd": 12.3}, "metadata": {"n": 1000, ...}}
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from uvit_decay.files.validation import as_type, parse, read_text
from uvit_decay.files.writing import replacing
from uvit_decay.terminal.errors import explain

PROBES = "probes.jsonl"
GENERATION = "generation.jsonl"
BRANCHES = "branches.jsonl"
HISTORIES = (PROBES, GENERATION, BRANCHES)
PROBE_TABLE, PROBE_REPORT = "probes.csv", "probes.json"  # the last probes: scores of every layer, protocol
NOISE_TABLE, NOISE_REPORT = "noise_share.csv", "noise_share.json"  # the same of the noise share
PLACE = ("layer", "name", "kind", "t")  # columns of PROBE_TABLE that identify a grid point; all others are scores
OF_CLASS_TOKENS = "_of_cls"  # ending of the names of ranks that were computed from class tokens, not pooled features
CHECKPOINTS = "checkpoints"  # folder beside the histories
CONFIG = "config.yaml"  # beside them, too
NUMBERED = re.compile(r"version_(\d+)")  # names of run folders
METRICS = "metrics.csv"  # all logged numbers, in another format
LARGEST = 2**28  # maximum bytes of a history
LARGEST_LOG = 2**30  # maximum bytes of metrics.csv


@dataclass(frozen=True)
class Measurement:
    """Results of one evaluation during training.

    Args:
        step: number of optimizer steps so far.
        epoch: number of passes over the training images so far, with fractions.
        images_seen: number of training images so far, over all devices.
        values: results by name. NaN and infinity are written as null, and null is read as NaN.
        metadata: the settings that the values depend on besides the step, as plain values.
    """

    step: int
    epoch: float
    images_seen: int
    values: dict[str, float | None]
    metadata: dict[str, object]


def read(path: Path) -> list[Measurement]:
    """Return the measurements of a history in the order of their steps; an empty list if there is no such file."""
    if not path.exists():
        return []
    found: dict[int, Measurement] = {}
    for number, line in enumerate(read_text(path, LARGEST).splitlines(), 1):
        where = f"{path}, line {number}"
        measurement = as_type(Measurement, parse(line, where), where)
        values = {}
        for name, value in measurement.values.items():
            values[name] = math.nan if value is None else value
        found[measurement.step] = replace(measurement, values=values)
    return [found[step] for step in sorted(found)]


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the step and the logged numbers of each row of a metrics.csv; nothing if there is no such file.

    An incomplete last line, which a killed run can leave, is ignored.
    """
    if not path.exists():
        return
    whole_lines = read_text(path, LARGEST_LOG).rpartition("\n")[0]
    with explain(f"{path} is damaged", ValueError, TypeError, LookupError, csv.Error):
        for row in csv.DictReader(whole_lines.splitlines()):
            step = int(row.pop("step"))
            yield step, {name: value for name, value in row.items() if value}


def append(path: Path, measurement: Measurement) -> None:
    """Add a measurement to a history; the file is replaced, so that a killed run leaves it complete.

    Measurements of this step or later are dropped: the run was continued from an earlier step.
    """
    history = [earlier for earlier in read(path) if earlier.step < measurement.step]
    history.append(measurement)
    _write(path, history)


def cut(step: int, source: Path, target: Path) -> None:
    """Write the measurements of `source` up to and including `step` to `target`, which may be the same file.

    The file is replaced, so that a kill leaves the old or the new one. Without such measurements there is no file.
    """
    measurements = read(source)
    kept = [measurement for measurement in measurements if measurement.step <= step]
    if kept and (target != source or len(kept) < len(measurements)):
        _write(target, kept)
    elif not kept:
        target.unlink(missing_ok=True)


def cut_rows(step: int, source: Path, target: Path) -> None:
    """Write the rows of a metrics.csv from before `step` to `target`, which may be the same file; see `cut`.

    Lightning logs a training step under the number of steps before it, and an evaluation under the number of steps
    after it. The columns stay, in their order.
    """
    kept = []
    names = {"step": ""}
    for logged_at, values in read_rows(source):
        names |= values
        end = step if "train/loss" in values else step + 1
        if logged_at < end:
            kept.append({**values, "step": logged_at})
    if not kept:
        target.unlink(missing_ok=True)
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, sorted(names))  # in the order of Lightning's writer
    writer.writeheader()
    writer.writerows(kept)
    content = text.getvalue().encode()
    if not target.exists() or target.read_bytes() != content:
        with replacing(target) as file:
            file.write(content)


def _write(path: Path, measurements: list[Measurement]) -> None:
    with replacing(path) as file:
        for measurement in measurements:
            entry = asdict(measurement)
            for name, value in measurement.values.items():
                if not math.isfinite(value):
                    entry["values"][name] = None  # JSON has no NaN or infinity
            file.write(f"{json.dumps(entry)}\n".encode())


def list_run_folders(experiment: Path) -> list[Path]:
    """Return the folders version_N of an experiment, the highest N first."""
    runs = []
    for folder in experiment.glob("version_*"):
        match = NUMBERED.fullmatch(folder.name)
        if match and folder.is_dir():
            runs.append((int(match[1]), folder))
    runs.sort(reverse=True)
    return [folder for _, folder in runs]


def name_run(folder: Path) -> str:
    """Return the name of a run in titles, such as digits/version_0."""
    if NUMBERED.fullmatch(folder.name):
        return f"{folder.parent.name}/{folder.name}"
    return folder.name


def run_of(checkpoint: str | Path) -> Path | None:
    """Return the folder of the run that wrote a checkpoint; None if it is not known.

    LastCheckpoint writes to `checkpoints` in the run folder.
    """
    folder = Path(checkpoint).parent
    if folder.name == CHECKPOINTS:
        return folder.parent
    return None
