"""Comparison of runs: learning curves or final values against an option, and a table averaged over seeds."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uvit_decay.compare.runs import BEST, KNN, MEAN_SHARE, TOP1, Run, by_key, find_option, grouped_by, is_number
from uvit_decay.compare.table import RANKS, Rank, last_steps, markdown, measured, pearson, rows, save_csv
from uvit_decay.evaluation.metric_table import displayed
from uvit_decay.history import GENERATION, PROBES
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, claimed

TRAINING = ("step", "epoch", "images")  # values of --x that are no options
FIGURES = (".png", ".pdf", ".svg")


def compare(
    runs: Sequence[Path],
    by: str = "alpha_min",
    x: str = "epoch",
    rank: Rank = "entropy",
    out: Path = Path("compare.png"),
) -> None:
    """Draw learning curves of runs, and print a table with a row for each value of an option, averaged over seeds.

    Curves are those of the probes; of runs without probes, those of FID and the other metrics of their samples. Writes
    the figure, and the table as a .csv beside it. What differs between the runs besides the options is remarked.

    Args:
        runs: run folders, such as runs/digits/version_0.
        by: the option with a curve for each value, such as net.schedule.
        x: the x axis: step, epoch or images of training, or a second option, such as net.depth, against which the
            values of the last evaluation are drawn.
        rank: the rank that is drawn and correlated: entropy, the paper's, of features centred over each sample; or
            dimensions, its exponential, of features centred over the samples.
        out: the figure, a .png, .pdf or .svg.
    """
    if out.suffix not in FIGURES:
        raise UserError(f"--out {out}: the figure is a {', '.join(FIGURES)}")
    spreadsheet = out.with_suffix(".csv")
    for path in (out, spreadsheet):
        check_writable(path)
    loaded = _read(runs)
    names, options = [by], [find_option(loaded, by)]
    if x not in TRAINING:
        names, options = [by, x], [*options, find_option(loaded, x, "--x")]
    if len(set(options)) < len(options):
        raise UserError(f"--x {x} is the option of --by: name another, or step, epoch or images")
    groups = grouped_by(loaded, options)
    table = rows(groups, rank)
    with claimed(out, spreadsheet):
        save_csv(spreadsheet, names, table)
        if x in TRAINING:
            save_curves(out, by, groups, x, rank)
        else:
            save_final_values(out, names, groups, options[1], rank)
    print(f"{markdown(names, table)}\n")
    print(f"Last evaluation at step {last_steps(loaded)}; mean +- standard deviation over runs.")
    if any(run.probed for run in loaded):
        print(f"r: Pearson's correlation of the {RANKS[rank][1]} and the accuracy of the best probe.")
    if protocol := measured(loaded):
        print(f"FID and IS: {protocol}.")
    for remark in remarks(loaded, *options):
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {spreadsheet.name}")


def _read(folders: Sequence[Path]) -> list[Run]:
    """Read the runs; raise a UserError if one is named twice."""
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if resolved.count(folder.resolve()) > 1:
            raise UserError(f"{folder} is named twice")
    return [Run.read(folder) for folder in folders]


def save_curves(path: Path, by: str, groups: Mapping[tuple[str, ...], Sequence[Run]], x: str, rank: Rank) -> None:
    """Draw rank and accuracies over training, and rank against best probe; without probes, the metrics of samples."""
    from uvit_decay.plots import learning_curves  # imports torch, which the command line must not

    every_run = [run for runs in groups.values() for run in runs]
    probed = any(run.probed for run in every_run)
    histories = {label: [run.evaluations for run in runs if run.probed == probed] for (label,), runs in groups.items()}
    r = pearson([point for runs in histories.values() for run in runs for point in run], rank)
    title = "too few evaluations for r" if math.isnan(r) else f"Pearson's r = {r:.2f}"
    against = {(RANKS[rank][0], BEST): title} if probed else {}
    learning_curves(path, histories, x, _drawn(every_run, rank), against, by)


def save_final_values(
    path: Path, names: Sequence[str], groups: Mapping[tuple[str, ...], Sequence[Run]], option: str, rank: Rank
) -> None:
    """Draw rank and accuracies of the last evaluations against `option`, a curve for each value of the first option."""
    from uvit_decay.plots import final_values

    every_run = [run for runs in groups.values() for run in runs]
    classifiers = any(run.top1 is not None for run in every_run)
    shown = _drawn(every_run, rank) | ({TOP1: "top-1 accuracy"} if classifiers else {})
    numbers = all(is_number(run.options[option]) for run in every_run)
    curves: dict[str, dict[float | str, list[Mapping[str, float]]]] = {}
    for (label, place), runs in groups.items():
        curves.setdefault(label, {})[float(place) if numbers else place] = [run.last for run in runs]
    final_values(path, curves, names[1], shown, names[0])


def _drawn(runs: Sequence[Run], rank: Rank) -> dict[str, str]:
    """Return the values that are drawn, and their titles: those of the probes, else those of the samples."""
    if not any(run.probed for run in runs):
        return {name: value.title for name, value in displayed().items() if any(name in run.last for run in runs)}
    key, title = RANKS[rank]
    shown = {key: title, BEST: "best probe accuracy", KNN: "kNN accuracy"}
    known = any(math.isfinite(run.last.get(MEAN_SHARE, math.nan)) for run in runs)
    return shown | ({MEAN_SHARE: "share of the mean"} if known else {})


SEED = "seed_everything"
COLLAPSED = 0.95  # share of the mean
ABOUT_ONE_RUN = (SEED, "model.seed", "data.seed", "ckpt_path")  # differ from run to run


def remarks(runs: Sequence[Run], *options: str) -> Iterator[str]:
    """Yield a line for everything in which the runs differ besides the options and the seed."""
    for other in sorted({key for run in runs for key in run.options} - {*options, *ABOUT_ONE_RUN}):
        if not other.startswith("trainer.logger"):
            yield from _differing(other, {run: run.options.get(other, "absent") for run in runs})
    # It does where a run was continued from a checkpoint whose history was not at hand.
    yield from _differing("the step of the first evaluation", {run: int(run.evaluations[0]["step"]) for run in runs})
    yield from _differing("the step of the last evaluation", {run: run.last_step for run in runs})
    if unprobed := [run for run in runs if not run.probed and any(other.probed for other in runs)]:
        yield f"no {PROBES}, so no curves, in {_names(unprobed)}"
    if collapsed := [run for run in runs if run.last.get(MEAN_SHARE, 0.0) > COLLAPSED]:
        what = f"of the watched features more than {COLLAPSED} is their mean, which all images share"
        yield f"{what}: {_names(collapsed)}"
    yield from _fid_remarks([run for run in runs if run.generation], [run for run in runs if not run.generation])
    for what, same in by_key(runs, lambda run: _setting(run, options)).items():
        if len(same) > 1:
            yield f"{what} occurs {len(same)} times, so the spread is not that of seeds: {_names(same)}"


def _setting(run: Run, options: Sequence[str]) -> str:
    return ", ".join([f"seed {run.options.get(SEED)}", *(f"{option} {run.options[option]}" for option in options)])


def _fid_remarks(generated: Sequence[Run], others: Sequence[Run]) -> Iterator[str]:
    """Yield remarks on the FID, which runs of denoisers may have; encoders have none."""
    for other in sorted({key for run in generated for key in run.protocol}):
        yield from _differing(f"FID's {other}", {run: run.protocol.get(other, "absent") for run in generated})
    if late := [run for run in generated if run.generation.step != run.last_step]:
        yield f"FID is not of the step of the last evaluation in {_names(late)}"
    if generated and others:
        yield f"no {GENERATION}, so no FID, in {_names(others)}"


def _differing(what: str, values: Mapping[Run, Any]) -> Iterator[str]:
    """Yield one line if not all runs have the same value."""
    words = {run: value if isinstance(value, str) else json.dumps(value, default=str) for run, value in values.items()}
    groups = by_key(values, words.__getitem__)
    if len(groups) > 1:
        yield f"{what} differs: {'; '.join(f'{value} in {_names(runs)}' for value, runs in groups.items())}"


def _names(runs: Sequence[Run], most: int = 3) -> str:
    return ", ".join(str(run.folder) for run in runs) if len(runs) <= most else f"{len(runs)} runs"
