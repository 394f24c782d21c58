"""Table of runs: a row for each value of the options that they are grouped by, averaged over seeds.

It has the form of the paper's Table 4. An evaluation is one of the probes during training, or of
the samples where there are no probes. r is Pearson's correlation
of the rank and the accuracy of the best probe: `within runs` is the mean of the correlations over the evaluations of
single runs; `over all evaluations` pools those of all runs of a row.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import StatisticsError, correlation, fmean, stdev
from typing import Literal, NamedTuple

from uvit_decay.compare.runs import BEST, DIMENSIONS, KNN, MEAN_SHARE, ON_TEST, RANK, TOP1, Run
from uvit_decay.evaluation.metric_table import displayed
from uvit_decay.runtime.files import replacing

Rank = Literal["entropy", "dimensions"]
RANKS: dict[Rank, tuple[str, str]] = {  # name of --rank: value, title
    "entropy": (RANK, "effective rank"),
    "dimensions": (DIMENSIONS, "dimensions"),
}
WITHIN, POOLED = "r_within_runs", "r_over_all_evaluations"
FEWEST = 3  # evaluations; the correlation of two points is always 1 or -1
COLUMNS = {  # value: title in the table, number of decimals; columns without any value are not shown
    TOP1: ("top-1", 3),
    BEST: ("best probe", 3),
    ON_TEST: ("best on test", 3),
    KNN: ("kNN", 3),
    RANK: ("effective rank", 3),
    DIMENSIONS: ("dimensions", 2),
    MEAN_SHARE: ("share of the mean", 3),
    **{key: (value.title, value.decimals) for key, value in displayed().items()},
    WITHIN: ("r within runs", 2),
    POOLED: ("r over all evaluations", 2),
}


class Spread(NamedTuple):
    """Mean and standard deviation (n - 1) over runs; NaN where there are too few values."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute both from the finite ones of `values`."""
        known = [value for value in values if math.isfinite(value)]
        return cls(fmean(known) if known else math.nan, stdev(known) if len(known) > 1 else math.nan)

    def format(self, decimals: int) -> str:
        """Format as `mean +- std`, without a part that is NaN; `-` if the mean is."""
        if math.isnan(self.mean):
            return "-"
        spread = "" if math.isnan(self.std) else f" +- {self.std:.{decimals}f}"
        return f"{self.mean:.{decimals}f}{spread}"


UNKNOWN = Spread(math.nan, math.nan)


class Row(NamedTuple):
    """A row of the table: a label for each of its options, and `cells` with keys of COLUMNS."""

    labels: tuple[str, ...]
    runs: Sequence[Run]
    cells: Mapping[str, Spread]


def rows(groups: Mapping[tuple[str, ...], Sequence[Run]], rank: Rank = "entropy") -> list[Row]:
    """Return a row for each group, and a last one with the correlations over all runs."""
    table = []
    for labels, runs in groups.items():
        cells = {key: Spread.of([run.last.get(key, math.nan) for run in runs]) for key in COLUMNS}
        table.append(Row(labels, runs, {**cells, **_correlations(runs, rank)}))
    every_run = [run for runs in groups.values() for run in runs]
    empty = ("",) * (len(table[0].labels) - 1) if table else ()
    return [*table, Row(("all", *empty), every_run, _correlations(every_run, rank))]


def _correlations(runs: Sequence[Run], rank: Rank) -> dict[str, Spread]:
    within = Spread.of([pearson(run.evaluations, rank) for run in runs])
    pooled = pearson([point for run in runs for point in run.evaluations], rank)
    return {WITHIN: within, POOLED: Spread(pooled, math.nan)}


def pearson(points: Sequence[Mapping[str, float]], rank: Rank = "entropy") -> float:
    """Return the correlation of rank and accuracy; NaN with too few points, or if either is constant."""
    pairs = [(point[RANKS[rank][0]], point[BEST]) for point in points]
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    try:
        return correlation(*zip(*known, strict=True)) if len(known) >= FEWEST else math.nan
    except StatisticsError:
        return math.nan


def markdown(options: Sequence[str], table: Sequence[Row]) -> str:
    """Format the table as Markdown, without the columns in which no run has a value."""
    shown = [key for key in COLUMNS if not all(math.isnan(row.cells.get(key, UNKNOWN).mean) for row in table)]
    lines = [[*options, "runs", *(COLUMNS[key][0] for key in shown)]]
    lines.append(["---"] * len(lines[0]))
    for row in table:
        cells = (row.cells.get(key, UNKNOWN).format(COLUMNS[key][1]) for key in shown)
        lines.append([*row.labels, str(len(row.runs)), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save_csv(path: Path, options: Sequence[str], table: Sequence[Row]) -> None:
    """Write the table as CSV; each row includes the last step and the protocol of its FID."""
    text = io.StringIO()
    writer = csv.writer(text)
    parts = (f"{key}_{part}" for key in COLUMNS for part in Spread._fields)
    writer.writerow([*options, "runs", "step", *parts, "measured"])
    for row in table:
        numbers = (value for key in COLUMNS for value in row.cells.get(key, UNKNOWN))
        plain = ("" if math.isnan(value) else f"{value:.6g}" for value in numbers)
        writer.writerow([*row.labels, len(row.runs), last_steps(row.runs), *plain, measured(row.runs)])
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def last_steps(runs: Sequence[Run]) -> str:
    """Format the steps of the runs' last evaluations: `2000`, or `1500 to 2000`."""
    steps = sorted({run.last_step for run in runs})
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def measured(runs: Sequence[Run]) -> str:
    """Summarise the protocol of FID and IS in a line; empty if no run measured them."""
    protocols = [run.protocol for run in runs if run.generation]
    if not protocols:
        return ""
    if any(protocol != protocols[0] for protocol in protocols):
        return "in different ways"
    names = {"n": "samples", "samples.weights": "weights", "samples.sampler": "sampler", "samples.steps": "steps"}
    names |= {"samples.guidance": "guidance", "reference.name": "against", "extractor": "features"}
    return ", ".join(f"{word} {protocols[0][name]}" for name, word in names.items() if name in protocols[0])
