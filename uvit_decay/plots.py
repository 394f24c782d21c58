"""Figures that callbacks and scripts save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor


def heat_map(
    path: Path,
    values: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str],
    title: str,
    marked: tuple[int, int],
) -> None:
    """Save an annotated heat map of `values` (rows, columns); `labels` are those of x and y, `marked` a framed cell."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(1.8 + 0.75 * len(columns), 1.4 + 0.42 * len(rows)), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    picture = axes.imshow(values.numpy(), aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=10)
    dark = float(values.min() + values.max()) / 2
    for row in range(len(rows)):
        for column in range(len(columns)):
            value = float(values[row, column])
            colour = "white" if value < dark else "black"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    axes.add_patch(Rectangle((marked[1] - 0.5, marked[0] - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2))
    figure.colorbar(picture)
    figure.savefig(path)
