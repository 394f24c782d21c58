"""Figures that callbacks and scripts save."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from uvit_decay.files.writing import replacing

History = Sequence[Mapping[str, float]]  # evaluations of one run, each with its `step`, in the order of steps
FinalValues = Mapping[float | str, Sequence[Mapping[str, float]]]  # value of an option: the final values of its runs
Colour = tuple[float, ...]  # RGBA in [0, 1]
# Okabe and Ito's colours for curves, distinct with any colour vision; the first four are clear on white and on black.
CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MOST_TICKS = 16  # places on an axis that are all labelled
PANEL = (3.2, 2.7)  # inches: width and height of a panel of curves
LETTER = 0.09  # inches: about the width of a letter in a legend


def heat_map(
    path: Path,
    values: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str],
    title: str,
    marked: tuple[int, int] | None,
) -> None:
    """Save an annotated heat map.

    Args:
        path: the image file to write.
        values: (rows, columns).
        rows: names of the rows.
        columns: names of the columns.
        labels: labels of the x axis and the y axis.
        title: title of the figure.
        marked: row and column of the value that gets a frame; None for no frame.
    """
    width = max(3.2, 1.8 + 0.75 * len(columns))
    height = 1.4 + 0.42 * len(rows)
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis")
    x_label, y_label = labels
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    figure.suptitle(title, fontsize=10, wrap=True)
    middle = float(values.min() + values.max()) / 2
    for row, numbers in enumerate(values.tolist()):
        for column, number in enumerate(numbers):
            colour = "white" if number < middle else "black"  # white on dark cells
            axes.text(column, row, f"{number:.1f}", ha="center", va="center", fontsize=9, color=colour)
    if marked is not None:
        row, column = marked
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2))
    figure.colorbar(image)
    _save(figure, path)


def learning_curves(
    path: Path,
    groups: Mapping[str, Sequence[History]],
    x: str,
    names: Mapping[str, str],
    against: Mapping[tuple[str, str], str],
    legend: str,
    title: str = "",
) -> None:
    """Save a panel of each key over `x`, and scatter plots of pairs of keys.

    Each group of runs has a colour. Each run is a thin line, and the mean of the group is a thick line, which ends
    where the shortest run ends; the title of the legend says so.

    Args:
        path: the image file to write.
        groups: name of the group: its runs.
        x: key of the x axis.
        names: key: label of each panel.
        against: (key of the x axis, key of the y axis): title of each scatter plot.
        legend: title of the legend, which lists the groups.
        title: title of the figure.
    """
    figure, axes_of = _panels(len(names) + len(against))
    panels = axes_of[: len(names)]
    scatters = axes_of[len(names) :]
    for runs, colour in zip(groups.values(), _curve_colours(len(groups)), strict=True):
        for axes, key in zip(panels, names, strict=True):
            _draw_curves(axes, runs, x, key, colour)
        for axes, (x_key, y_key) in zip(scatters, against, strict=True):
            _draw_points(axes, runs, x_key, y_key, colour)
            axes.set(xlabel=names[x_key], ylabel=names[y_key])
    for axes, label in zip(panels, names.values(), strict=True):
        _set_title(axes, label)
        axes.set_xlabel(x)
        places = axes.dataLim
        if places.width <= 1e-3 * places.x1:  # a single evaluation: matplotlib would show a tiny part of the training
            axes.set_xlim(left=0)
    for axes, correlation in zip(scatters, against.values(), strict=True):
        _set_title(axes, correlation)
    handles = [line for line in panels[0].lines if line.get_label() == "mean"]
    _add_legend(figure, handles, list(groups), legend + _explain_lines(groups))
    figure.suptitle(title, fontsize=10, wrap=True)
    _save(figure, path)


def _explain_lines(groups: Mapping[str, Sequence[History]]) -> str:
    """Return what thin and thick lines are; an empty text if each group is a single run."""
    text = ""
    for runs in groups.values():
        ends = {run[-1]["step"] for run in runs if run}
        if len(ends) > 1:
            return " (thin: a run; thick: the mean, until the shortest run ends)"
        if len(runs) > 1:
            text = " (thin: a run; thick: the mean)"
    return text


def final_values(
    path: Path,
    groups: Mapping[str, FinalValues],
    x: str,
    names: Mapping[str, str],
    legend: str,
    title: str = "",
) -> None:
    """Save a panel of each key over an option: a point per run, and a curve through the means of runs.

    A mean of several runs has a bar of one standard deviation (n - 1).

    Args:
        path: the image file to write.
        groups: name of each curve: the final values of its runs by the value of the option.
        x: name of the option.
        names: key: label of each panel.
        legend: title of the legend, which lists the curves.
        title: title of the figure.
    """
    figure, panels = _panels(len(names))
    handles = []
    for runs_at, colour in zip(groups.values(), _curve_colours(len(groups)), strict=True):
        curves = []
        for axes, key in zip(panels, names, strict=True):
            curves.append(_final_curve(axes, runs_at, key, colour))
        handles.append(curves[0])
    places: dict[float | str, None] = {}  # in the order of the curves, each once
    for runs_at in groups.values():
        places.update(dict.fromkeys(runs_at))
    for axes, label in zip(panels, names.values(), strict=True):
        _set_title(axes, label)
        axes.set_xlabel(x)
        if len(places) <= MOST_TICKS:
            axes.set_xticks(list(places))
    _add_legend(figure, handles, list(groups), legend)
    figure.suptitle(title, fontsize=10, wrap=True)
    _save(figure, path)


def _final_curve(axes: Axes, runs_at: FinalValues, key: str, colour: Colour) -> ErrorbarContainer:
    """Draw a point for each run, and a curve through the means with bars of their spread.

    Runs without a finite value of `key` are left out. Return the curve for the legend.
    """
    places, means, deviations = [], [], []
    for place, runs in runs_at.items():
        numbers = [run.get(key, math.nan) for run in runs]
        finite = list(filter(math.isfinite, numbers))
        if not finite:
            continue
        axes.scatter([place] * len(finite), finite, s=10, color=colour, alpha=0.5, edgecolors="none")
        places.append(place)
        means.append(fmean(finite))
        deviations.append(stdev(finite) if len(finite) > 1 else 0.0)
    return axes.errorbar(places, means, deviations, color=colour, marker="o", markersize=4, capsize=3)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure and its `count` panels, two or three beside one another."""
    columns = 2 if count in (2, 4) else min(count, 3)
    rows = math.ceil(count / columns)
    width, height = PANEL
    figure = Figure(figsize=(1 + width * columns, height * rows), layout="constrained", dpi=120)
    every_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in every_axes[count:]:
        unused.remove()
    return figure, every_axes[:count]


def _add_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], title: str) -> None:
    """Put a legend below the panels, in as many columns as fit, and make the figure higher by its height."""
    longest = max(map(len, labels))
    width, height = figure.get_size_inches()
    columns = int(width / (LETTER * longest + 0.6))
    columns = min(max(columns, 1), len(labels))
    rows = 1 + math.ceil(len(labels) / columns)
    figure.set_size_inches(width, height + 0.2 + 0.2 * rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=title, frameon=False)


def _curve_colours(count: int) -> list[Colour]:
    """Return a colour for each curve: CURVES, or a sequence of `count` where there are more.

    The sequence ends before the yellow of its map, which is faint on white.
    """
    if count <= len(CURVES):
        return [to_rgba(colour) for colour in CURVES[:count]]
    return [colormaps["plasma"](0.8 * i / (count - 1)) for i in range(count)]


def _set_title(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png")


def _draw_points(axes: Axes, runs: Sequence[History], x_key: str, y_key: str, colour: Colour) -> None:
    """Draw a point for each evaluation of the runs."""
    x, y = [], []
    for run in runs:
        for point in run:
            x.append(point[x_key])
            y.append(point[y_key])
    axes.scatter(x, y, s=12, color=colour, edgecolors="none", alpha=0.8)


def _draw_curves(axes: Axes, runs: Sequence[History], x: str, key: str, colour: Colour) -> None:
    """Draw a thin line for each run and a thick one, labelled "mean", for their mean; a single run is its mean."""
    points_at: dict[float, list[Mapping[str, float]]] = {}
    for run in runs:
        points = [point for point in run if key in point]
        if len(runs) > 1:
            places = [point[x] for point in points]
            values = [point[key] for point in points]
            marker = "o" if len(points) == 1 else None  # a line through one point is invisible
            axes.plot(places, values, color=colour, alpha=0.4, linewidth=0.8, marker=marker, markersize=3)
        for point in points:
            points_at.setdefault(point["step"], []).append(point)
    mean_x, mean_y = [], []
    for _, points in sorted(points_at.items()):
        if len(points) == len(runs):  # runs may end at different steps: the mean is over the steps that all runs have
            mean_x.append(fmean(point[x] for point in points))
            mean_y.append(fmean(point[key] for point in points))
    marker = "o" if len(mean_x) <= 20 else None  # more markers would hide the lines
    axes.plot(mean_x, mean_y, color=colour, linewidth=1.8, marker=marker, markersize=3.5, label="mean")


def heat_maps(path: Path, panels: Mapping[str, Tensor], columns: Sequence[float], labels: tuple[str, str]) -> None:
    """Save heat maps with logarithmic colours.

    Args:
        path: the image file to write.
        panels: title of each heat map: its values (rows, columns); values up to 0 stay blank.
        columns: positions of the columns.
        labels: labels of the x axis and the y axis.
    """
    figure = Figure(figsize=(1 + 3.4 * len(panels), 3.6), layout="constrained", dpi=100)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    x_label, y_label = labels
    for axes, (title, values) in zip(row, panels.items(), strict=True):
        positive = values.where(values > 0, torch.nan)
        norm = LogNorm() if positive.isfinite().any() else None
        image = axes.pcolormesh(columns, range(len(values)), positive.numpy(), norm=norm, shading="nearest")
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        figure.colorbar(image)
    _save(figure, path)
