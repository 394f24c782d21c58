"""Comparison of runs: learning curves, and a table with a row for each value of an option, averaged over seeds.

The table has the form of the paper's Table 4. A look is one evaluation of the probes during training. r is Pearson's
correlation of the effective rank and the accuracy of the best probe: `within runs` is the mean of the correlations over
the looks of single runs; `over all looks` pools the looks of all runs of a row.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import StatisticsError, correlation, fmean, stdev
from typing import Any, Literal, NamedTuple

from uvit_decay.compare.runs import BEST, KNN, ON_TEST, RANK, SEED, Run
from uvit_decay.plots import learning_curves
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import replacing

X = Literal["step", "epoch", "images"]
WITHIN, POOLED = "r_within_runs", "r_over_all_looks"
ABOUT_ONE_RUN = (SEED, "model.seed", "data.seed", "ckpt_path")  # differ from run to run, or have a remark in `remarks`
FEWEST = 3  # looks; the correlation of two points is always 1 or -1


class Column(NamedTuple):
    """A column of the table: title, name in the CSV, and number of decimals."""

    title: str
    short: str
    decimals: int


COLUMNS = {
    BEST: Column("best probe", "best_accuracy", 3),
    ON_TEST: Column("best on test", "best_on_test_accuracy", 3),
    KNN: Column("kNN", "knn", 3),
    RANK: Column("effective rank", "effective_rank", 3),
    "fid": Column("FID", "fid", 2),
    "is": Column("IS", "is", 2),
    WITHIN: Column("r within runs", WITHIN, 2),
    POOLED: Column("r over all looks", POOLED, 2),
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

    def shown(self, decimals: int) -> str:
        """Format as `mean +- std`, without a part that is NaN; `-` if the mean is."""
        if math.isnan(self.mean):
            return "-"
        spread = "" if math.isnan(self.std) else f" +- {self.std:.{decimals}f}"
        return f"{self.mean:.{decimals}f}{spread}"


class Row(NamedTuple):
    """A row of the table; `cells` has keys of COLUMNS."""

    label: str
    runs: Sequence[Run]
    cells: Mapping[str, Spread]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders.

    Raises:
        UserError: a folder is named twice, or holds no run with probes.
    """
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise UserError(f"{folder} is named twice")
        seen.add(folder.resolve())
    return [Run.read(folder) for folder in folders]


def option(runs: Sequence[Run], by: str) -> str:
    """Return the full name of the option `by`, which may be given by its last part or parts.

    Raises:
        UserError: no option or several match, or a run does not have it.
    """
    wanted = by.replace(".init_args", "")
    names = {name for run in runs for name in run.options}
    found = sorted({wanted} & names or {name for name in names if name.endswith(f".{wanted}")})
    if not found:
        raise UserError(f"--by {by}: the configurations have no such option; model.net.alpha_min is one")
    if len(found) > 1:
        raise UserError(f"--by {by} may be {', '.join(found)}: name one of them")
    for run in runs:
        if found[0] not in run.options:
            raise UserError(f"--by {by}: the configuration of {run.folder} has no {found[0]}")
    return found[0]


def grouped(runs: Sequence[Run], name: str) -> dict[str, list[Run]]:
    """Group runs by the value of an option, in descending order: the paper's tables begin with the plain network."""

    def place(run: Run) -> tuple[bool, float | int, str]:
        value = run.options[name]
        number = type(value) in (int, float)
        return not number, -value if number else 0.0, str(value)

    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=place):
        groups.setdefault(str(run.options[name]), []).append(run)
    return groups


def pearson(looks: Sequence[Mapping[str, float]]) -> float:
    """Return the correlation of effective rank and accuracy; NaN with too few looks, or if either is constant."""
    pairs = [(look[RANK], look[BEST]) for look in looks]
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    try:
        return correlation(*zip(*known, strict=True)) if len(known) >= FEWEST else math.nan
    except StatisticsError:
        return math.nan


def rows(groups: Mapping[str, Sequence[Run]]) -> list[Row]:
    """Return a row for each group, and a last one with the correlations over all runs."""
    found = []
    for label, runs in groups.items():
        cells = {key: Spread.of([run.last[key] for run in runs]) for key in COLUMNS if key in runs[0].last}
        found.append(Row(label, runs, {**cells, **_correlations(runs)}))
    everyone = [run for runs in groups.values() for run in runs]
    return [*found, Row("all", everyone, _correlations(everyone))]


def _correlations(runs: Sequence[Run]) -> dict[str, Spread]:
    within = Spread.of([pearson(run.looks) for run in runs])
    return {WITHIN: within, POOLED: Spread(pearson([look for run in runs for look in run.looks]), math.nan)}


NOTHING = Spread(math.nan, math.nan)


def markdown(by: str, table: Sequence[Row]) -> str:
    """Format the table as Markdown."""
    lines = [[by, "runs", *(column.title for column in COLUMNS.values())], ["---"] * (len(COLUMNS) + 2)]
    for row in table:
        cells = (row.cells.get(key, NOTHING).shown(column.decimals) for key, column in COLUMNS.items())
        lines.append([row.label, str(len(row.runs)), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save_csv(path: Path, by: str, table: Sequence[Row]) -> None:
    """Write the table as CSV; each row includes the last step and the protocol of its FID."""
    text = io.StringIO()
    writer = csv.writer(text)
    shorts = [column.short for column in COLUMNS.values()]
    writer.writerow([by, "runs", "step", *(f"{s}_{part}" for s in shorts for part in ("mean", "std")), "measured"])
    for row in table:
        numbers = (value for key in COLUMNS for value in row.cells.get(key, NOTHING))
        plain = ("" if math.isnan(value) else f"{value:.6g}" for value in numbers)
        writer.writerow([row.label, len(row.runs), last_steps(row.runs), *plain, measured(row.runs)])
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def last_steps(runs: Sequence[Run]) -> str:
    """Format the steps of the runs' last looks: `2000`, or `1500 to 2000`."""
    steps = [int(run.looks[-1]["step"]) for run in runs]
    return f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"


def measured(runs: Sequence[Run]) -> str:
    """Summarise the protocol of FID and IS in a line; empty if no run measured them."""
    ways = [run.protocol for run in runs if run.generation]
    if not ways:
        return ""
    if any(way != ways[0] for way in ways):
        return "in different ways"
    parts = {"n": "samples", "samples.weights": "weights", "samples.sampler": "sampler", "samples.steps": "steps"}
    parts |= {"samples.guidance": "guidance", "reference.name": "against", "extractor": "features"}
    return ", ".join(f"{said} {ways[0][name]}" for name, said in parts.items() if name in ways[0])


def remarks(runs: Sequence[Run], name: str) -> Iterator[str]:
    """Yield a line for everything in which the runs differ besides the option `name` and the seed."""
    for other in sorted({key for run in runs for key in run.options} - {name, *ABOUT_ONE_RUN}):
        if not other.startswith("trainer.logger"):
            yield from _differing(other, {run: run.options.get(other, "absent") for run in runs})
    yield from _differing("the step of the last look", {run: int(run.looks[-1]["step"]) for run in runs})
    for run in runs:
        if run.options.get("ckpt_path"):
            yield f"{run.folder} went on from {run.options['ckpt_path']}: earlier looks are in the folder of that run"
    yield from _fid_remarks(runs)
    twins: dict[str, list[Run]] = {}
    for run in runs:
        twins.setdefault(f"seed {run.options.get(SEED)}, {name} {run.options[name]}", []).append(run)
    for what, same in twins.items():
        if len(same) > 1:
            yield f"{what} is there {len(same)} times, so the spread is not that of seeds: {_names(same)}"


def _fid_remarks(runs: Sequence[Run]) -> Iterator[str]:
    generated = [run for run in runs if run.generation]
    for other in sorted({key for run in generated for key in run.protocol}):
        yield from _differing(f"FID's {other}", {run: run.protocol.get(other, "absent") for run in generated})
    late = [run for run in generated if run.generation.get("step") != run.looks[-1]["step"]]
    if late:
        yield f"FID is not of the step of the last look in {_names(late)}"
    missing = [run for run in runs if not run.generation]
    if missing:
        yield f"no generation.json, so no FID, in {_names(missing)}"


def _differing(what: str, values: Mapping[Run, Any]) -> Iterator[str]:
    """Yield one line if not all runs have the same value."""
    having: dict[str, list[Run]] = {}
    for run, value in values.items():
        having.setdefault(value if isinstance(value, str) else json.dumps(value, default=str), []).append(run)
    if len(having) > 1:
        yield f"{what} differs: {'; '.join(f'{value} in {_names(found)}' for value, found in having.items())}"


def _names(runs: Sequence[Run], most: int = 3) -> str:
    return ", ".join(str(run.folder) for run in runs) if len(runs) <= most else f"{len(runs)} runs"


def notes(runs: Sequence[Run]) -> str:
    """Explain the numbers of the table in three lines."""
    lines = [
        f"Last look at step {last_steps(runs)}; mean +- standard deviation over runs.",
        "r: Pearson's correlation of the effective rank and the accuracy of the best probe.",
        f"FID and IS: {measured(runs) or 'none were measured'}.",
    ]
    return "\n".join(lines)


def axis(runs: Sequence[Run], x: X | None) -> X:
    """Return the x axis of the curves: `x`, or for None epochs if all runs record them, else steps.

    Raises:
        UserError: a run does not record its epochs, or its images.
    """
    for wanted in ("epoch", "step") if x is None else (x,):
        silent = [run for run in runs if any(math.isnan(look[wanted]) for look in run.looks)]
        if not silent:
            return wanted
    why = "a log tells them from the second epoch on" if x == "epoch" else "its configuration has no data.batch_size"
    raise UserError(f"--x {x}: {silent[0].folder} does not say its {x.removesuffix('s')}s, {why}; take --x step")


def save_figure(path: Path, by: str, groups: Mapping[str, Sequence[Run]], x: X) -> None:
    """Draw effective rank, best probe and kNN accuracy over training, and the first two against each other."""
    looks = {label: [run.looks for run in runs] for label, runs in groups.items()}
    r = pearson([look for runs in looks.values() for run in runs for look in run])
    names = {RANK: "effective rank", BEST: "best probe accuracy", KNN: "kNN accuracy"}
    title = "too few looks for r" if math.isnan(r) else f"Pearson's r = {r:.2f}"
    learning_curves(path, looks, x, names, (RANK, BEST), title, by)
