"""Figures that callbacks and scripts save."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
from jaxtyping import Float, Int64, UInt8
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from uvit_decay.runtime.files import replacing

History = Sequence[Mapping[str, float]]  # evaluations of one run, each with its `step`, in the order of steps
# Petroff's ten colours (arXiv:2107.02270), distinct with any colour vision and in print; so are the marker shapes.
TEN = ("3f90da", "ffa90e", "bd1f01", "94a4a2", "832db6", "a96b59", "e76300", "b9ac70", "717581", "92dadd")
SHAPES = "osD^vP<X>*"


def heat_map(
    path: Path,
    values: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str],
    title: str,
    marked: tuple[int, int],
) -> None:
    """Save an annotated heat map of `values` (rows, columns), with axis `labels` (x, y) and a frame around `marked`."""
    size = (max(3.2, 1.8 + 0.75 * len(columns)), 1.4 + 0.42 * len(rows))
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    axes = figure.add_subplot()
    image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    figure.suptitle(title, fontsize=10, wrap=True)
    dark = float(values.min() + values.max()) / 2
    for row in range(len(rows)):
        for column in range(len(columns)):
            value = float(values[row, column])
            colour = "white" if value < dark else "black"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    axes.add_patch(Rectangle((marked[1] - 0.5, marked[0] - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2))
    figure.colorbar(image)
    _save(figure, path)


def learning_curves(
    path: Path,
    groups: Mapping[str, Sequence[History]],
    x: str,
    names: Mapping[str, str],
    against: Mapping[tuple[str, str], str],
    legend: str,
) -> None:
    """Save a panel of each key in `names` (key: label) over `x`, and a scatter plot of each pair of keys in `against`.

    Each group of runs has a colour, each of its runs a thin line, and their mean a thick line. The values of `against`
    are the titles of the scatter plots, `legend` is that of the legend of groups.
    """
    count = len(names) + len(against)
    figure = Figure(figsize=(2 + 2.5 * count, 3.5), layout="constrained", dpi=100)
    axes_of = figure.subplots(1, count, squeeze=False)[0]
    panels, scatters = axes_of[: len(names)], axes_of[len(names) :]
    colours = _sequence(len(groups))
    for runs, colour in zip(groups.values(), colours, strict=True):
        for axes, key in zip(panels, names, strict=True):
            _curves(axes, runs, x, key, colour)
        for axes, keys in zip(scatters, against, strict=True):
            points = [[point[key] for run in runs for point in run] for key in keys]
            axes.scatter(*points, s=12, color=colour, edgecolors="none", alpha=0.8)
            axes.set(xlabel=names[keys[0]], ylabel=names[keys[1]])
    for axes, above in zip(axes_of, (*names.values(), *against.values()), strict=True):
        _plain_axes(axes, above)
    for axes in panels:
        axes.set_xlabel(x)
    handles = [line for line in panels[0].lines if line.get_label() == "mean"]
    figure.legend(handles, list(groups), loc="outside right center", title=legend, frameon=False)
    _save(figure, path)


def final_values(
    path: Path,
    groups: Mapping[str, Mapping[float | str, Sequence[Mapping[str, float]]]],
    x: str,
    names: Mapping[str, str],
    legend: str,
) -> None:
    """Save a panel of each key in `names` (key: label) over an option `x`, of the final values of runs.

    `groups` has, for each curve, the runs at each value of the option. A run is a point; the curve goes through their
    means, with a bar of one standard deviation (n - 1) where there are several. `legend` is the legend's title.
    """
    figure = Figure(figsize=(2 + 3.3 * len(names), 3.5), layout="constrained", dpi=100)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    places = list(dict.fromkeys(place for runs_at in groups.values() for place in runs_at))
    handles = []
    for runs_at, colour in zip(groups.values(), _sequence(len(groups)), strict=True):
        drawn = [_final_curve(axes, runs_at, key, colour) for axes, key in zip(panels, names, strict=True)]
        handles.append(drawn[0])
    for axes, above in zip(panels, names.values(), strict=True):
        _plain_axes(axes, above)
        axes.set_xlabel(x)
        axes.set_xticks(places)
    figure.legend(handles, list(groups), loc="outside right center", title=legend, frameon=False)
    _save(figure, path)


def _final_curve(
    axes: Axes, runs_at: Mapping[float | str, Sequence[Mapping[str, float]]], key: str, colour: tuple[float, ...]
) -> ErrorbarContainer:
    """Draw a point for each run, and a curve through the means with bars of their spread; unknown values are left out.

    Return the curve for the legend.
    """
    known = {}
    for place, runs in runs_at.items():
        if values := [run[key] for run in runs if math.isfinite(run.get(key, math.nan))]:
            known[place] = values
            axes.scatter([place] * len(values), values, s=10, color=colour, alpha=0.5, edgecolors="none")
    means = [fmean(values) for values in known.values()]
    spread = [stdev(values) if len(values) > 1 else 0.0 for values in known.values()]
    return axes.errorbar(list(known), means, spread, color=colour, marker="o", markersize=4, capsize=3)


def _sequence(count: int) -> list[tuple[float, ...]]:
    """Return colours of a sequential map, legible with any colour vision, without its yellow end, faint on white."""
    return [colormaps["plasma"](0.8 * i / max(count - 1, 1)) for i in range(count)]


def _plain_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png")


def _curves(axes: Axes, runs: Sequence[History], x: str, key: str, colour: tuple[float, ...]) -> None:
    """Draw a thin line for each run and a thick one for their mean, labelled so; a single run is its mean."""
    runs = [[point for point in run if key in point] for run in runs]
    for run in runs if len(runs) > 1 else ():
        line = [point[x] for point in run], [point[key] for point in run]
        dot = "o" if len(run) == 1 else None  # else nothing of it would be seen
        axes.plot(*line, color=colour, alpha=0.4, linewidth=0.8, marker=dot, markersize=3)
    points_at: dict[float, list[Mapping[str, float]]] = {}
    for run in runs:
        for point in run:
            points_at.setdefault(point["step"], []).append(point)
    # Runs may end at different steps: the mean is taken over the steps that all of them have.
    shared = [points for _, points in sorted(points_at.items()) if len(points) == len(runs)]
    mean_x, mean_y = ([fmean(point[name] for point in points) for points in shared] for name in (x, key))
    marker = "o" if len(shared) <= 20 else None  # more markers would hide the lines
    axes.plot(mean_x, mean_y, color=colour, linewidth=1.8, marker=marker, markersize=3.5, label="mean")


def distinct(count: int) -> UInt8[Tensor, "count 3"]:
    """Return RGB colours for `count` groups; beyond ten, neighbouring colours are hard to distinguish."""
    if count <= len(TEN):
        return torch.tensor([list(bytes.fromhex(colour)) for colour in TEN[:count]], dtype=torch.uint8)
    return torch.tensor(colormaps["turbo"](torch.linspace(0, 1, count).numpy(), bytes=True)[:, :3])


def image_table(path: Path, columns: Mapping[str, UInt8[Tensor, "n h w 3"]], rows: Sequence[str], title: str) -> None:
    """Save a table of RGB images of any sizes, drawn equally large without smoothing, with headings of `columns`."""
    figure = Figure(figsize=(0.5 + 1.7 * len(columns), 0.8 + 1.7 * len(rows)), layout="constrained", dpi=120)
    table = figure.subplots(len(rows), len(columns), squeeze=False)
    for j, (name, images) in enumerate(columns.items()):
        table[0, j].set_title(name, fontsize=9)
        for axes, image in zip(table[:, j], images, strict=True):
            axes.imshow(image.numpy(), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    for axes, name in zip(table[:, 0], rows, strict=True):
        axes.set_ylabel(name, fontsize=9)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def scatter(
    path: Path,
    panels: Mapping[str, Float[Tensor, "n 2"]],
    labels: Int64[Tensor, " n"],
    names: Sequence[str],
    title: str,
) -> None:
    """Save scatter plots of points, one panel each, with a colour and a marker for each of at most ten classes."""
    figure = Figure(figsize=(1.6 + 4.6 * len(panels), 4.8), layout="constrained", dpi=120)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    colours = distinct(len(names)) / 255
    for axes, (heading, points) in zip(row, panels.items(), strict=True):
        for label, name in enumerate(names):
            x, y = points[labels == label].T.numpy()
            axes.scatter(x, y, s=20, color=colours[label].numpy(), marker=SHAPES[label], lw=0, label=name)
        axes.set(xticks=[], yticks=[], title=heading)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside center right", markerscale=1.6)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def heat_maps(path: Path, panels: Mapping[str, Tensor], columns: Sequence[float], labels: tuple[str, str]) -> None:
    """Save a heat map with logarithmic colours of each of `panels` (title: values (rows, columns))."""
    figure = Figure(figsize=(1 + 3.4 * len(panels), 3.6), layout="constrained", dpi=100)
    for axes, (title, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        shown = values.where(values > 0, torch.nan)
        norm = LogNorm() if shown.isfinite().any() else None
        image = axes.pcolormesh(columns, range(len(values)), shown.numpy(), norm=norm, shading="nearest")
        axes.set(title=title, xlabel=labels[0], ylabel=labels[1])
        figure.colorbar(image)
    _save(figure, path)
