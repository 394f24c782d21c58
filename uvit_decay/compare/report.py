"""Report of a comparison of runs: a table averaged over seeds, curves, and remarks on what else differs.

The table has a row for each value of the options that runs are grouped by, in the form of the paper's Table 4. r is
Pearson's correlation of the rank and the accuracy of the best probe: `within runs` is the mean of the correlations over
the evaluations of single runs; `over all evaluations` pools those of all runs of a row.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import StatisticsError, correlation, fmean, stdev
from typing import Any, NamedTuple

from uvit_decay.compare.runs import BEST, DIMENSIONS, KNN, MEAN_SHARE, ON_TEST, RANK, TOP1, Run, by_key, is_number
from uvit_decay.evaluation.metric_table import displayed, on_screen
from uvit_decay.history import GENERATION, PROBES
from uvit_decay.plots import final_values, learning_curves
from uvit_decay.runtime.files import replacing

Groups = Mapping[tuple[str, ...], Sequence[Run]]  # runs by the values of one option or two
RANKS = {"entropy": RANK, "dimensions": DIMENSIONS}  # by the names of --rank
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


def rows(groups: Groups, rank: str = RANK) -> list[Row]:
    """Return a row for each group, and a last one with the correlations over all runs."""
    table = []
    for labels, runs in groups.items():
        cells = {key: Spread.of([run.last.get(key, math.nan) for run in runs]) for key in COLUMNS}
        table.append(Row(labels, runs, {**cells, **_correlations(runs, rank)}))
    every_run = [run for runs in groups.values() for run in runs]
    empty = ("",) * (len(table[0].labels) - 1) if table else ()
    return [*table, Row(("all", *empty), every_run, _correlations(every_run, rank))]


def _correlations(runs: Sequence[Run], rank: str) -> dict[str, Spread]:
    within = Spread.of([pearson(run.evaluations, rank) for run in runs])
    pooled = pearson([point for run in runs for point in run.evaluations], rank)
    return {WITHIN: within, POOLED: Spread(pooled, math.nan)}


def pearson(points: Sequence[Mapping[str, float]], rank: str = RANK) -> float:
    """Return the correlation of rank and accuracy; NaN with too few points, or if either is constant."""
    pairs = [(point[rank], point[BEST]) for point in points]
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    try:
        return correlation(*zip(*known, strict=True)) if len(known) >= FEWEST else math.nan
    except StatisticsError:
        return math.nan


def title_of(value: str, runs: Sequence[Run]) -> str:
    """Return the title of a value, of a rank with the tokens whose rank it is, of a distance with the features."""
    tokens = sorted({run.ranked for run in runs if run.probed}) if value in RANKS.values() else ()
    extractors = {str(run.protocol.get("extractor")) for run in runs if value in run.last}
    title = COLUMNS[value][0] + (f" of {' or '.join(tokens)}" if tokens else "")
    return on_screen(value, title, extractors.pop()) if len(extractors) == 1 else title


def markdown(options: Sequence[str], table: Sequence[Row]) -> str:
    """Format the table as Markdown, without the columns in which no run has a value."""
    shown = [key for key in COLUMNS if not all(math.isnan(row.cells.get(key, UNKNOWN).mean) for row in table)]
    lines = [[*options, "runs", *(title_of(key, table[-1].runs) for key in shown)]]
    lines.append(["---"] * len(lines[0]))
    for row in table:
        cells = (row.cells.get(key, UNKNOWN).format(COLUMNS[key][1]) for key in shown)
        lines.append([*row.labels, str(len(row.runs)), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save_csv(path: Path, options: Sequence[str], table: Sequence[Row]) -> None:
    """Write the table as CSV; each row includes the last step and the protocol of its samples' metrics."""
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
    """Summarise the protocol of the metrics of samples in a line; empty if no run has any."""
    protocols = [run.protocol for run in runs if run.generation]
    if not protocols:
        return ""
    if any(protocol != protocols[0] for protocol in protocols):
        return "in different ways"
    names = {"n": "samples", "samples.weights": "weights", "samples.sampler": "sampler", "samples.steps": "steps"}
    names |= {"samples.guidance": "guidance", "reference.name": "against", "extractor": "features"}
    return ", ".join(f"{word} {protocols[0][name]}" for name, word in names.items() if name in protocols[0])


def save_curves(path: Path, by: str, groups: Groups, x: str, rank: str) -> None:
    """Draw rank and accuracies over training, and rank against best probe; without probes, the metrics of samples."""
    every_run = [run for runs in groups.values() for run in runs]
    probed = any(run.probed for run in every_run)
    histories = {label: [run.evaluations for run in runs if run.probed == probed] for (label,), runs in groups.items()}
    r = pearson([point for runs in histories.values() for run in runs for point in run], rank)
    title = "too few evaluations for r" if math.isnan(r) else f"Pearson's r = {r:.2f}"
    against = {(rank, BEST): title} if probed else {}
    learning_curves(path, histories, x, _drawn(every_run, rank), against, by)


def save_final_values(path: Path, names: Sequence[str], groups: Groups, option: str, rank: str) -> None:
    """Draw rank and accuracies of the last evaluations against `option`, a curve for each value of the first option."""
    every_run = [run for runs in groups.values() for run in runs]
    classifiers = any(run.top1 is not None for run in every_run)
    shown = _drawn(every_run, rank) | ({TOP1: "top-1 accuracy"} if classifiers else {})
    numbers = all(is_number(run.options[option]) for run in every_run)
    curves: dict[str, dict[float | str, list[Mapping[str, float]]]] = {}
    for (label, place), runs in groups.items():
        curves.setdefault(label, {})[float(place) if numbers else place] = [run.last for run in runs]
    final_values(path, curves, names[1], shown, names[0])


def _drawn(runs: Sequence[Run], rank: str) -> dict[str, str]:
    """Return the values that are drawn, and their titles: those of the probes, else those of the samples."""
    if not any(run.probed for run in runs):
        return {name: title_of(name, runs) for name in displayed() if any(name in run.last for run in runs)}
    shown = {rank: title_of(rank, runs), BEST: "best probe accuracy", KNN: "kNN accuracy"}
    known = any(math.isfinite(run.last.get(MEAN_SHARE, math.nan)) for run in runs)
    return shown | ({MEAN_SHARE: "share of the mean"} if known else {})


SEED = "seed_everything"
COLLAPSED = 0.95  # share of the mean
ABOUT_ONE_RUN = (SEED, "model.seed", "data.seed", "ckpt_path")  # differ from run to run


def remarks(runs: Sequence[Run], *options: str) -> Iterator[str]:
    """Yield a line for everything in which the runs differ besides the options and the seed."""
    for other in sorted({key for run in runs for key in run.options} - {*options, *ABOUT_ONE_RUN}):
        if not other.startswith("trainer.logger"):
            known = [run for run in runs if other in run.options or not run.has_part(other)]
            yield from _differing(other, {run: run.options.get(other, "absent") for run in known})
    yield from _differing("the pool of the rank", {run: run.ranked for run in runs if run.probed})
    # It does where a run was continued from a checkpoint whose history was not at hand.
    yield from _differing("the step of the first evaluation", {run: int(run.evaluations[0]["step"]) for run in runs})
    yield from _differing("the step of the last evaluation", {run: run.last_step for run in runs})
    if unprobed := [run for run in runs if not run.probed and any(other.probed for other in runs)]:
        yield f"no {PROBES}, so no curves, in {_names(unprobed)}"
    if collapsed := [run for run in runs if run.last.get(MEAN_SHARE, 0.0) > COLLAPSED]:
        what = f"of the tracked features more than {COLLAPSED} is their mean, which all images share"
        yield f"{what}: {_names(collapsed)}"
    generated = [run for run in runs if run.generation]
    for other in sorted({key for run in generated for key in run.protocol}):
        yield from _differing(f"the metrics' {other}", {run: run.protocol.get(other, "absent") for run in generated})
    if late := [run for run in generated if run.generation.step != run.last_step]:
        yield f"metrics of samples are not of the step of the last evaluation in {_names(late)}"
    if generated and (others := [run for run in runs if not run.generation]):
        yield f"no {GENERATION}, so no metrics of samples, in {_names(others)}"
    named = {"seed": SEED, **{option: option for option in options}}
    settings = by_key(runs, lambda run: ", ".join(f"{word} {run.options.get(name)}" for word, name in named.items()))
    for what, same in settings.items():
        if len(same) > 1:
            yield f"{what} occurs {len(same)} times, so the spread is not that of seeds: {_names(same)}"


def _differing(what: str, values: Mapping[Run, Any]) -> Iterator[str]:
    """Yield one line if not all runs have the same value."""
    words = {run: value if isinstance(value, str) else json.dumps(value, default=str) for run, value in values.items()}
    groups = by_key(values, words.__getitem__)
    if len(groups) > 1:
        yield f"{what} differs: {'; '.join(f'{value} in {_names(runs)}' for value, runs in groups.items())}"


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(str(run.folder) for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"
