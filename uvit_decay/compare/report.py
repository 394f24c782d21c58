"""The table that compares runs, averaged over seeds.

The table has a row for each value of the options that runs are grouped by, in the form of the paper's Table 4. r is
Pearson's correlation of the rank and the accuracy of the best probe. `within runs` is the mean of the correlations of
the single runs, each over its evaluations; `over all evaluations` is the correlation over the evaluations of all runs
of a row.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import StatisticsError, correlation, fmean, stdev
from typing import Any, NamedTuple

from uvit_decay.compare.runs import (
    BEST,
    EFFECTIVE_RANK,
    ENTROPY,
    KNN,
    MEAN_SHARE,
    NOISE_SHARE,
    ON_TEST,
    PROBE,
    TOP1,
    FinishedRun,
)
from uvit_decay.evaluation.metric_table import CONSISTENCY, OF_LABELS, collect_values, format_title
from uvit_decay.files.writing import replacing

Groups = Mapping[tuple[str, ...], Sequence[FinishedRun]]  # runs by the values of one option or two
RANKS = {"entropy": ENTROPY, "effective": EFFECTIVE_RANK}  # by the names of --rank
WITHIN, POOLED = "r_within_runs", "r_over_all_evaluations"
PLACES = ("step", "epoch", "images")  # of an evaluation in the training, not values
FEWEST = 3  # evaluations; the correlation of two points is always 1 or -1
COLUMNS = {  # value: title in the table, number of decimals; columns without any value are not shown
    TOP1: ("top-1", 3),
    PROBE: ("probe", 3),
    BEST: ("best probe", 3),
    ON_TEST: ("best on test", 3),
    KNN: ("kNN", 3),
    ENTROPY: ("entropy of the spectrum", 3),
    EFFECTIVE_RANK: ("effective rank", 2),
    MEAN_SHARE: ("share of the mean", 3),
    NOISE_SHARE: ("noise share", 3),
    **{key: (value.title, value.decimals) for key, value in collect_values().items()},
    CONSISTENCY: (OF_LABELS.title, OF_LABELS.decimals),
    WITHIN: ("r within runs", 2),
    POOLED: ("r over all evaluations", 2),
}


class Spread(NamedTuple):
    """Mean and standard deviation (n - 1) over `n` runs or pairs; NaN where there are too few values."""

    mean: float
    std: float
    n: int = 0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.std / math.sqrt(max(self.n, 1))

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return mean and standard deviation of the finite entries of `values`."""
        known = list(filter(math.isfinite, values))
        if not known:
            return cls(math.nan, math.nan)
        if len(known) == 1:
            return cls(fmean(known), math.nan, 1)
        return cls(fmean(known), stdev(known), len(known))

    @property
    def is_known(self) -> bool:
        """True if there is a mean."""
        return not math.isnan(self.mean)

    def format(self, decimals: int, sign: str = "", error: bool = False) -> str:
        """Return `mean +- std` as text; without ` +- std` if it is NaN, and `-` if the mean is NaN.

        Args:
            decimals: number of decimals.
            sign: "+" shows the sign of a positive mean.
            error: show the standard error of the mean instead of the standard deviation.
        """
        if math.isnan(self.mean):
            return "-"
        spread = self.error if error else self.std
        mean = f"{self.mean:{sign}.{decimals}f}"
        if math.isnan(spread):
            return mean
        return f"{mean} +- {spread:.{decimals}f}"


UNKNOWN = Spread(math.nan, math.nan)


class Row(NamedTuple):
    """A row of the table: a label for each option, its runs, and `cells`: names of values -> values, see `list_values`.

    `count` is the number of runs or pairs of the row; a cell has fewer values if some of them lack it.
    """

    labels: tuple[str, ...]
    runs: Sequence[FinishedRun]
    cells: Mapping[str, Spread]
    count: int

    def cell(self, key: str) -> Spread:
        """Return the value in the column `key`; UNKNOWN if the row has no such value."""
        return self.cells.get(key, UNKNOWN)

    def format(self, key: str, sign: str = "", error: bool = False) -> str:
        """Return a value as text, with its number of runs or pairs in parentheses if these are not all of the row.

        Args:
            key: the column.
            sign: see `Spread.format`.
            error: see there.
        """
        cell = self.cell(key)
        _, decimals = COLUMNS[key]
        text = cell.format(decimals, sign, error)
        if 0 < cell.n < self.count:
            return f"{text} ({cell.n})"
        return text


def rows(groups: Groups, rank: str = ENTROPY) -> list[Row]:
    """Return a row for each group, and a last row with the correlations over all runs.

    Args:
        groups: labels, one for each option -> runs with these values, see `group_by_options`.
        rank: key of the rank that is correlated with the accuracy, one of RANKS.
    """
    table = []
    labels: tuple[str, ...] = ()
    every_run = list_runs(groups)
    names = list_values(every_run)
    for labels, runs in groups.items():
        results = [run.last for run in runs]
        cells = {}
        for key in names:
            cells[key] = Spread.of([result.get(key, math.nan) for result in results])
        cells |= _correlations(runs, rank)
        table.append(Row(labels, runs, cells, len(runs)))
    empty = [""] * (len(labels) - 1)
    table.append(Row(("all", *empty), every_run, _correlations(every_run, rank), len(every_run)))
    return table


def list_values(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the names of all values: first those of the table's columns, then the others that a run has recorded."""
    return [*COLUMNS, *list_left_out(runs)]


def list_left_out(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the names of the values that runs have recorded and the table leaves out."""
    recorded: set[str] = set()
    for run in runs:
        recorded.update(run.last)
    return sorted(recorded.difference(COLUMNS, PLACES))


def list_runs(groups: Groups) -> list[FinishedRun]:
    """Return the runs of all groups, group by group."""
    return list(chain.from_iterable(groups.values()))


def _correlations(runs: Sequence[FinishedRun], rank: str) -> dict[str, Spread]:
    """Return the correlations of rank and accuracy by their keys in COLUMNS."""
    within = []
    evaluations: list[Mapping[str, float]] = []
    for run in runs:
        within.append(pearson(run.evaluations, rank))
        evaluations += run.evaluations
    return {WITHIN: Spread.of(within), POOLED: Spread(pearson(evaluations, rank), math.nan)}


def pearson(points: Sequence[Mapping[str, float]], rank: str = ENTROPY) -> float:
    """Return Pearson's correlation of rank and accuracy over the points.

    NaN with fewer than FEWEST finite points, or if either value is constant.
    """
    ranks = []
    accuracies = []
    for point in points:
        if math.isfinite(point[rank]) and math.isfinite(point[BEST]):
            ranks.append(point[rank])
            accuracies.append(point[BEST])
    if len(ranks) < FEWEST:
        return math.nan
    try:
        return correlation(ranks, accuracies)
    except StatisticsError:
        return math.nan


def title_of(value: str, runs: Sequence[FinishedRun]) -> str:
    """Return the title of a value: a rank names its tokens, a distance names its feature extractor."""
    title = COLUMNS[value][0] if value in COLUMNS else value
    tokens = set()
    extractors = set()
    for run in runs:
        if run.probed:
            tokens.add(run.ranked)
        if value in run.last:
            extractors.add(str(run.protocol.get("extractor")))
    if tokens and value in RANKS.values():
        title += f" of {' or '.join(sorted(tokens))}"
    if len(extractors) == 1:
        return format_title(value, title, extractors.pop())
    return title


def markdown(options: Sequence[str], table: Sequence[Row], counted: str = "runs") -> str:
    """Return the table as Markdown, without the columns in which no run has a value.

    Args:
        options: names of the options, the headings of the labels.
        table: the rows, see `rows`.
        counted: "runs", with standard deviations; or "pairs", signed differences with standard errors.
    """
    shown = []
    header = [*options, counted]
    for key in COLUMNS:
        if any(row.cell(key).is_known for row in table):
            shown.append(key)
            header.append(title_of(key, table[-1].runs))
    lines = [_markdown_row(header), _markdown_row(["---"] * len(header))]
    for row in table:
        if counted == "runs" and not any(row.cell(key).is_known for key in shown):
            continue  # the last row, without correlations
        cells = [*row.labels, str(row.count)]
        for key in shown:
            if counted == "pairs":
                cells.append(row.format(key, sign="+", error=True))
            else:
                cells.append(row.format(key))
        lines.append(_markdown_row(cells))
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def save_csv(path: Path, options: Sequence[str], table: Sequence[Row], differences: Sequence[Row] = ()) -> None:
    """Write all recorded values as CSV; each row includes the last step and the protocol of its metrics of samples.

    Args:
        path: the file, which is replaced.
        options: names of the options, the headings of the labels.
        table: the rows, see `rows`.
        differences: paired differences of the rows from a baseline, which add columns.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    header = [*options, "runs", "step"]
    names = list_values(table[-1].runs)
    for key in names:
        header += [f"{key}_mean", f"{key}_std"]
        if differences:
            header += [f"{key}_difference", f"{key}_difference_error", f"{key}_pairs"]
    writer.writerow([*header, "measured"])
    paired = {row.labels: row for row in differences}
    for row in table:
        line = [*row.labels, row.count, last_steps(row.runs)]
        for key in names:
            cell = row.cell(key)
            line += [_format_known(cell.mean), _format_known(cell.std)]
            if differences:
                difference = paired[row.labels].cell(key) if row.labels in paired else UNKNOWN
                line += [_format_known(difference.mean), _format_known(difference.error), difference.n or ""]
        writer.writerow([*line, describe_metrics(row.runs)])
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def _format_known(value: float) -> str:
    """Return a value with six significant digits; empty if it is NaN."""
    if math.isnan(value):
        return ""
    return f"{value:.6g}"


def last_steps(runs: Sequence[FinishedRun]) -> str:
    """Return the steps of the runs' last evaluations as text: `2000`, or `1500 to 2000`."""
    steps = sorted({run.last_step for run in runs})
    if len(steps) == 1:
        return str(steps[0])
    return f"{steps[0]} to {steps[-1]}"


METRIC_SETTINGS = {  # name in a run's protocol: word in the summary
    "n": "samples",
    "samples.weights": "weights",
    "samples.sampler": "sampler",
    "samples.steps": "steps",
    "samples.guidance": "guidance",
    "reference.name": "against",
    "extractor": "features",
}


def describe_metrics(runs: Sequence[FinishedRun]) -> str:
    """Return the protocol of the metrics of samples as one line; an empty text if no run has such metrics."""
    common: dict[str, Any] | None = None
    for run in runs:
        if run.generation is None:
            continue
        if common is not None and run.protocol != common:
            return "in different ways"
        common = run.protocol
    if common is None:
        return ""
    settings = []
    for name, word in METRIC_SETTINGS.items():
        if name in common:
            settings.append(f"{word} {common[name]}")
    return ", ".join(settings)
