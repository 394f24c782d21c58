"""Comparison of runs: learning curves, and a table with a row for each value of an option, averaged over seeds.

The table has the form of the paper's Table 4. An evaluation is one of the probes during training. r is Pearson's
correlation of the effective rank and the accuracy of the best probe: `within runs` is the mean of the correlations over
the evaluations of single runs; `over all evaluations` pools those of all runs of a row.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import StatisticsError, correlation, fmean, stdev
from typing import Any, Literal, NamedTuple

from uvit_decay.compare.runs import BEST, KNN, ON_TEST, RANK, Run
from uvit_decay.evaluation.metric_table import displayed, in_training
from uvit_decay.history import GENERATION
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, replacing

X = Literal["step", "epoch", "images"]
FIGURES = (".png", ".pdf", ".svg")
WITHIN, POOLED = "r_within_runs", "r_over_all_evaluations"
SEED = "seed_everything"
ABOUT_ONE_RUN = (SEED, "model.seed", "data.seed", "ckpt_path")  # differ from run to run
FEWEST = 3  # evaluations; the correlation of two points is always 1 or -1


COLUMNS = {  # value: title in the table, number of decimals
    BEST: ("best probe", 3),
    ON_TEST: ("best on test", 3),
    KNN: ("kNN", 3),
    RANK: ("effective rank", 3),
    **{key: (value.title, value.decimals) for key, value in displayed(in_training()).items()},
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
    """A row of the table; `cells` has keys of COLUMNS."""

    label: str
    runs: Sequence[Run]
    cells: Mapping[str, Spread]


def compare(runs: Sequence[Path], by: str = "alpha_min", x: X = "epoch", out: Path = Path("compare.png")) -> None:
    """Draw learning curves of runs, and print a table with a row for each value of an option, averaged over seeds.

    Writes the figure, and the table as a .csv beside it. What differs between the runs besides the option is remarked.

    Args:
        runs: run folders, such as runs/digits/version_0.
        by: the option, such as net.schedule.
        x: the x axis of the curves.
        out: the figure, a .png, .pdf or .svg.
    """
    if out.suffix not in FIGURES:
        raise UserError(f"--out {out}: the figure is a {', '.join(FIGURES)}")
    check_writable(out)
    resolved = [folder.resolve() for folder in runs]
    for folder in runs:
        if resolved.count(folder.resolve()) > 1:
            raise UserError(f"{folder} is named twice")
    loaded = [Run.read(folder) for folder in runs]
    option = find_option(loaded, by)
    groups = grouped(loaded, option)
    table = rows(groups)
    save_csv(out.with_suffix(".csv"), by, table)
    save_figure(out, by, groups, x)
    print(f"{markdown(by, table)}\n")
    print(f"Last evaluation at step {last_steps(loaded)}; mean +- standard deviation over runs.")
    print("r: Pearson's correlation of the effective rank and the accuracy of the best probe.")
    print(f"FID and IS: {measured(loaded) or 'none were measured'}.")
    for remark in remarks(loaded, option):
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {out.with_suffix('.csv').name}")


def find_option(runs: Sequence[Run], by: str) -> str:
    """Return the full name of the option `by`, which may be given by its last part or parts; all runs must have it."""
    ending = by.replace(".init_args", "")
    names = {name for run in runs for name in run.options}
    found = sorted({ending} & names or {name for name in names if name.endswith(f".{ending}")})
    if not found:
        raise UserError(f"--by {by}: the configurations have no such option; model.net.alpha_min is one")
    if len(found) > 1:
        raise UserError(f"--by {by} may be {', '.join(found)}: name one of them")
    for run in runs:
        if found[0] not in run.options:
            raise UserError(f"--by {by}: the configuration of {run.folder} has no {found[0]}")
    return found[0]


def grouped(runs: Sequence[Run], option: str) -> dict[str, list[Run]]:
    """Group runs by the value of an option, in descending order: the paper's tables begin with the plain network."""

    def place(run: Run) -> tuple[bool, float | int, str]:
        value = run.options[option]
        number = type(value) in (int, float)
        return not number, -value if number else 0.0, str(value)

    return _by(sorted(runs, key=place), lambda run: str(run.options[option]))


def _by(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    """Group runs by a key, in the order of their first occurrence."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def pearson(points: Sequence[Mapping[str, float]]) -> float:
    """Return the correlation of effective rank and accuracy; NaN with too few points, or if either is constant."""
    pairs = [(point[RANK], point[BEST]) for point in points]
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    try:
        return correlation(*zip(*known, strict=True)) if len(known) >= FEWEST else math.nan
    except StatisticsError:
        return math.nan


def rows(groups: Mapping[str, Sequence[Run]]) -> list[Row]:
    """Return a row for each group, and a last one with the correlations over all runs."""
    table = []
    for label, runs in groups.items():
        cells = {key: Spread.of([run.last.get(key, math.nan) for run in runs]) for key in COLUMNS}
        table.append(Row(label, runs, {**cells, **_correlations(runs)}))
    every_run = [run for runs in groups.values() for run in runs]
    return [*table, Row("all", every_run, _correlations(every_run))]


def _correlations(runs: Sequence[Run]) -> dict[str, Spread]:
    within = Spread.of([pearson(run.probes) for run in runs])
    return {WITHIN: within, POOLED: Spread(pearson([point for run in runs for point in run.probes]), math.nan)}


def markdown(by: str, table: Sequence[Row]) -> str:
    """Format the table as Markdown."""
    lines = [[by, "runs", *(title for title, _ in COLUMNS.values())], ["---"] * (len(COLUMNS) + 2)]
    for row in table:
        cells = (row.cells.get(key, UNKNOWN).format(decimals) for key, (_, decimals) in COLUMNS.items())
        lines.append([row.label, str(len(row.runs)), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save_csv(path: Path, by: str, table: Sequence[Row]) -> None:
    """Write the table as CSV; each row includes the last step and the protocol of its FID."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([by, "runs", "step", *(f"{key}_{part}" for key in COLUMNS for part in Spread._fields), "measured"])
    for row in table:
        numbers = (value for key in COLUMNS for value in row.cells.get(key, UNKNOWN))
        plain = ("" if math.isnan(value) else f"{value:.6g}" for value in numbers)
        writer.writerow([row.label, len(row.runs), last_steps(row.runs), *plain, measured(row.runs)])
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


def remarks(runs: Sequence[Run], option: str) -> Iterator[str]:
    """Yield a line for everything in which the runs differ besides the option and the seed."""
    for other in sorted({key for run in runs for key in run.options} - {option, *ABOUT_ONE_RUN}):
        if not other.startswith("trainer.logger"):
            yield from _differing(other, {run: run.options.get(other, "absent") for run in runs})
    # It does where a run was continued from a checkpoint whose history was not at hand.
    yield from _differing("the step of the first evaluation", {run: int(run.probes[0]["step"]) for run in runs})
    yield from _differing("the step of the last evaluation", {run: run.last_step for run in runs})
    yield from _fid_remarks(runs)
    twins = _by(runs, lambda run: f"seed {run.options.get(SEED)}, {option} {run.options[option]}")
    for what, same in twins.items():
        if len(same) > 1:
            yield f"{what} occurs {len(same)} times, so the spread is not that of seeds: {_names(same)}"


def _fid_remarks(runs: Sequence[Run]) -> Iterator[str]:
    generated = [run for run in runs if run.generation]
    for other in sorted({key for run in generated for key in run.protocol}):
        yield from _differing(f"FID's {other}", {run: run.protocol.get(other, "absent") for run in generated})
    if late := [run for run in generated if run.generation.step != run.last_step]:
        yield f"FID is not of the step of the last evaluation in {_names(late)}"
    if missing := [run for run in runs if not run.generation]:
        yield f"no {GENERATION}, so no FID, in {_names(missing)}"


def _differing(what: str, values: Mapping[Run, Any]) -> Iterator[str]:
    """Yield one line if not all runs have the same value."""
    words = {run: value if isinstance(value, str) else json.dumps(value, default=str) for run, value in values.items()}
    groups = _by(values, words.__getitem__)
    if len(groups) > 1:
        yield f"{what} differs: {'; '.join(f'{value} in {_names(runs)}' for value, runs in groups.items())}"


def _names(runs: Sequence[Run], most: int = 3) -> str:
    return ", ".join(str(run.folder) for run in runs) if len(runs) <= most else f"{len(runs)} runs"


def save_figure(path: Path, by: str, groups: Mapping[str, Sequence[Run]], x: X) -> None:
    """Draw effective rank, best probe and kNN accuracy over training, and the first two against each other."""
    from uvit_decay.plots import learning_curves  # imports torch, which the command line must not

    histories = {label: [run.probes for run in runs] for label, runs in groups.items()}
    r = pearson([point for runs in histories.values() for run in runs for point in run])
    names = {RANK: "effective rank", BEST: "best probe accuracy", KNN: "kNN accuracy"}
    title = "too few evaluations for r" if math.isnan(r) else f"Pearson's r = {r:.2f}"
    learning_curves(path, histories, x, names, (RANK, BEST), title, by)
