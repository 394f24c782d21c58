"""The last probes and noise shares of a run, layer by layer, of the callback LinearProbes or of `evaluate.py probe`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from uvit_decay.files.validation import flat, parse, read_text
from uvit_decay.files.writing import quote_path
from uvit_decay.runs.history import (
    CHECKPOINTS,
    CONFIG,
    NOISE_REPORT,
    NOISE_TABLE,
    PLACE,
    PROBE_REPORT,
    PROBE_TABLE,
    PROBES,
    read,
)
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.program import localise

OF_ONE_RUN = ("checkpoint", "step", "best", "tracked", "number")  # metadata of probes that differ from run to run
TABLES = (PROBE_TABLE, NOISE_TABLE)
LARGEST = 2**26  # maximum bytes of a table or report
Scores = Mapping[str, float]


@dataclass(frozen=True)
class LayerScores:
    """Scores of the chosen layers of one evaluation of probes.

    Args:
        step: optimizer steps of the network that was probed.
        protocol: the settings of the probes, flat.
        by_layer: number of a layer, 0 for the embeddings -> its scores by name, means over `times`.
        times: noise levels, ascending; 0 alone for an encoder.
    """

    step: int
    protocol: Mapping[str, Any]
    by_layer: Mapping[int, Scores]
    times: tuple[float, ...]

    def describe_levels(self) -> str:
        """Return the noise levels as text: `t = 0.1`, `mean over t = 0.1, 0.3`, or `clean images`."""
        if self.times == (0.0,):
            return "clean images"
        levels = ", ".join(f"{t:g}" for t in self.times)
        return f"t = {levels}" if len(self.times) == 1 else f"mean over t = {levels}"

    def average(self) -> Scores:
        """Return the mean of every score over the layers."""
        return _average(self.by_layer.values())


@dataclass(frozen=True)
class ChosenProbes:
    """Probes with --x layer.

    Args:
        probes: the folder in each run folder where evaluate.py probe --out has written; default: the probes of
            training, or without them the only such folder.
        layers: comma-separated numbers or names of the layers that are drawn, and averaged in the table; default: all.
        times: comma-separated noise levels, over which scores are averaged; default: all.
    """

    probes: str | None = None
    layers: tuple[str, ...] | None = None
    times: tuple[float, ...] | None = None

    def read(self, run: Path) -> LayerScores:
        """Return the scores of a run."""
        folder = self._find(run)
        rows = _read_rows(folder)
        times = self._choose_times(rows, folder)
        numbers = self._choose_layers(rows, folder)
        by_layer = {}
        for number in numbers:
            by_layer[number] = _average(row.scores for row in rows if row.layer == number and row.t in times)
        step, protocol = _read_metadata(folder)
        return LayerScores(step, protocol, by_layer, times)

    def _find(self, run: Path) -> Path:
        """Return the folder of the tables."""
        if self.probes is not None:
            folder = run / self.probes
            if not _list_tables(folder):
                raise UserError(f"{folder} has no {PROBE_TABLE}", argument="probes")
            return folder
        if _list_tables(run):
            return run
        found = sorted({table.parent for name in TABLES for table in run.glob(f"*/{name}")})
        if not found:
            data = f"--data {quote_path(run / CONFIG)} --out {quote_path(run / 'probes')}"
            command = (
                f"{localise('python evaluate.py')} probe --ckpt {quote_path(run / CHECKPOINTS / 'last.ckpt')} {data}"
            )
            raise UserError(f"{run} has no {PROBE_TABLE}: {command} writes it")
        if len(found) > 1:
            names = ", ".join(folder.name for folder in found)
            raise UserError(f"{run} has the folders {names}: choose one", argument="probes")
        return found[0]

    def _choose_times(self, rows: Sequence[_Row], folder: Path) -> tuple[float, ...]:
        """Return the chosen noise levels."""
        known = sorted({row.t for row in rows})
        chosen = known if self.times is None else sorted(set(self.times))
        for t in chosen:
            if t not in known:
                levels = ", ".join(f"{level:g}" for level in known)
                raise UserError(f"{folder} has no {t:g}, it has {levels}", argument="times")
        return tuple(chosen)

    def _choose_layers(self, rows: Sequence[_Row], folder: Path) -> list[int]:
        """Return the numbers of the chosen layers, ascending."""
        known = {}
        for row in rows:
            known[str(row.layer)] = row.layer
            known[row.name] = row.layer
        names = known if self.layers is None else self.layers
        for name in names:
            if name not in known:
                raise UserError(f"{folder} has no {name}, it has {', '.join(known)}", argument="layers")
        return sorted({known[name] for name in names})


@dataclass(frozen=True)
class _Row:
    """A row of the table: the scores of a layer at a noise level."""

    layer: int
    name: str
    t: float
    scores: dict[str, float]


def _list_tables(folder: Path) -> list[Path]:
    """Return the tables in a folder."""
    return [folder / name for name in TABLES if (folder / name).exists()]


def _read_rows(folder: Path) -> list[_Row]:
    """Return the rows of the tables in a folder, joined by layer and noise level."""
    rows: dict[tuple[int, float], _Row] = {}
    for table in _list_tables(folder):
        for line in csv.DictReader(io.StringIO(read_text(table, LARGEST))):
            row = _Row(int(line["layer"]), line["name"], float(line["t"]), {})
            row = rows.setdefault((row.layer, row.t), row)
            row.scores.update((name, float(value)) for name, value in line.items() if name not in PLACE)
    return list(rows.values())


def _average(cells: Iterable[Scores]) -> dict[str, float]:
    """Return the mean of every score; all cells have the same scores."""
    cells = list(cells)
    return {name: fmean(cell[name] for cell in cells) for name in cells[0]}


def _read_metadata(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the step of the network and the settings of the probes: of the report, or of the run's last evaluation."""
    report = folder / PROBE_REPORT
    if not report.exists():
        report = folder / NOISE_REPORT
    if report.exists():
        settings = parse(read_text(report, LARGEST), report)["protocol"]
        step = settings["step"]
    else:
        *_, last = read(folder / PROBES)
        settings = last.metadata
        step = last.step
    protocol = dict(flat(settings))
    for name in list(protocol):
        if name.partition(".")[0] in OF_ONE_RUN:
            del protocol[name]
    return step, protocol
