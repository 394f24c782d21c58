"""Figures that compare runs: curves over training, over an option, and over the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from uvit_decay.compare.report import COLUMNS, PLACES, RANKS, Groups, last_steps, list_runs, pearson, title_of
from uvit_decay.compare.runs import BEST, KNN, MEAN_SHARE, NOISE_SHARE, OF_LAYERS, TOP1, FinishedRun, is_number
from uvit_decay.evaluation.metric_table import collect_values
from uvit_decay.plots import final_values, learning_curves
from uvit_decay.runs.history import name_run

MOST_NAMED = 4  # runs in the title of a figure


def save_curves(path: Path, by: str, groups: Groups, x: str, rank: str) -> None:
    """Draw rank and accuracies over training, and rank against best probe; without probes, the metrics of samples.

    Args:
        path: the picture, which is replaced.
        by: name of the option, the title of the legend.
        groups: the label of one option -> runs with these values, see `group_by_options`.
        x: name of the value on the horizontal axis, such as `step`.
        rank: key of the rank, one of RANKS.
    """
    every_run = list_runs(groups)
    probed = any(run.probed for run in every_run)
    histories: dict[str, list[Sequence[Mapping[str, float]]]] = {}
    evaluations: list[Mapping[str, float]] = []
    for (label,), runs in groups.items():
        histories[label] = []
        for run in runs:
            if run.probed == probed:
                histories[label].append(run.evaluations)
                evaluations += run.evaluations
    against = {}
    if probed:
        r = pearson(evaluations, rank)
        against[rank, BEST] = "too few evaluations for r" if math.isnan(r) else f"Pearson's r = {r:.2f}"
    learning_curves(path, histories, x, _panel_titles(every_run, rank), against, by, _entitle(every_run))


def _entitle(runs: Sequence[FinishedRun]) -> str:
    """Return the title of a figure of these runs."""
    names = f"{len(runs)} runs"
    if len(runs) <= MOST_NAMED:
        names = ", ".join(name_run(run.folder) for run in runs)
    return f"{names}, last evaluation at step {last_steps(runs)}"


def save_final_values(path: Path, names: Sequence[str], groups: Groups, option: str, rank: str) -> None:
    """Draw rank and accuracies of the last evaluations against `option`, a curve for each value of the first option.

    Args:
        path: the picture, which is replaced.
        names: names of the two options, of the curves and of the horizontal axis.
        groups: labels of the two options -> runs with these values, see `group_by_options`.
        option: the second option, in full, as in the runs' configurations.
        rank: key of the rank, one of RANKS.
    """
    every_run = list_runs(groups)
    shown = _panel_titles(every_run, rank)
    if any(TOP1 in run.validation for run in every_run):
        shown[TOP1] = "top-1 accuracy"
    numbers = all(is_number(run.options[option]) for run in every_run)
    curves: dict[str, dict[float | str, list[Mapping[str, float]]]] = {}
    for (label, value), runs in groups.items():
        place = float(value) if numbers else value
        curves.setdefault(label, {})[place] = [run.last for run in runs]
    final_values(path, curves, names[1], shown, names[0], _entitle(every_run))


def save_layers(path: Path, by: str, groups: Groups, rank: str) -> None:
    """Draw the scores of the last probes against the layer, a curve for each value of the option.

    Args:
        path: the picture, which is replaced.
        by: name of the option, the title of the legend.
        groups: the label of one option -> runs with these values, read layer by layer.
        rank: key of the rank that is drawn, one of RANKS.
    """
    every_run = list_runs(groups)
    titles = {}
    for name in OF_LAYERS:
        left_out = name in RANKS.values() and name != rank
        if not left_out and any(math.isfinite(run.last[name]) for run in every_run):
            titles[name] = COLUMNS[name][0]
    curves: dict[str, dict[float | str, list[Mapping[str, float]]]] = {}
    for (label,), runs in groups.items():
        curves[label] = {}
        for run in runs:
            for number, scores in run.layers.by_layer.items():
                curves[label].setdefault(number, []).append(scores)
    title = f"{_entitle(every_run)}, {every_run[0].layers.describe_levels()}"
    final_values(path, curves, "features after layer", titles, by, title)


def _panel_titles(runs: Sequence[FinishedRun], rank: str) -> dict[str, str]:
    """Return the values to draw and their titles: values of the probes or, without probes, metrics of samples.

    Metrics of one's own are drawn if there are no others.
    """
    measured: set[str] = set()
    for run in runs:
        for name, value in run.evaluations[-1].items():
            if math.isfinite(value):
                measured.add(name)
    titles = {}
    if not any(run.probed for run in runs):
        known = [name for name in collect_values() if name in measured]
        for name in known or sorted(measured.difference(PLACES)):
            titles[name] = title_of(name, runs)
        return titles
    titles[rank] = title_of(rank, runs)
    titles[BEST] = "best probe accuracy"
    titles[KNN] = "kNN accuracy"
    for name in (MEAN_SHARE, NOISE_SHARE):
        if name in measured:
            titles[name] = COLUMNS[name][0]
    return titles
