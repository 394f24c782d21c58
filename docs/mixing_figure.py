"""Draws mixing.png, the mixing matrix of each kind of shortcut: `python docs/mixing_figure.py docs/mixing.png`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import nn

from uvit_decay.decay import mixing_matrix, shortcuts
from uvit_decay.nn import UViT

STYLE = Path(__file__).with_name("figures.mplstyle")
BLOCKS, ALPHA_MIN = 12, 0.7
KINDS = {  # what is drawn, by title
    "plain": dict(),
    "linear, gain": dict(schedule="linear", alpha_min=ALPHA_MIN),
    "cosine": dict(schedule="cosine", alpha_min=ALPHA_MIN),
    "constant": dict(schedule="constant"),
    "mp_sum": dict(schedule="mp_sum"),
    "constant-branch": dict(schedule="constant-branch"),
    "layerscale, start": dict(schedule="layerscale"),
    "linear in U-ViT": None,
}
SIZE = 11  # of letters: the page shows the figure at two thirds of its size


def in_order(network: nn.Module) -> np.ndarray:
    """Return the mixing matrix of a network with the column of each merge where it happens."""
    matrix = mixing_matrix(network).numpy()
    branches = len(network.shortcuts.alphas)
    columns = list(range(branches + 1))
    for j in reversed(range(len(network.merges))):
        columns.insert(network.merges[j].branch + 1, branches + 1 + j)
    return matrix[:, columns]


def u_vit() -> nn.Module:
    """Return a small U-ViT of BLOCKS + 1 blocks."""
    return UViT(image_size=8, patch_size=4, dim=8, depth=BLOCKS, heads=1, alpha_min=ALPHA_MIN)


def draw(axes: Axes, title: str, matrix: np.ndarray) -> AxesImage:
    """Draw a matrix whose rows are divided by their largest entries; what a row cannot read stays white."""
    shares = matrix / matrix.max(axis=1, keepdims=True)
    sources = shares.shape[1]
    for row in range(len(shares)):
        last = np.flatnonzero(matrix[row])[-1]
        shares[row, last + 1 :] = np.nan
    palette = colormaps["viridis"]
    image = axes.imshow(shares, vmin=0, vmax=1, cmap=palette, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=SIZE + 1)
    axes.set(xticks=[0, sources - 1], yticks=[0, len(shares) - 1])
    axes.set_xticklabels(["input", "last"], fontsize=SIZE)
    axes.set_yticklabels(["first", "output"], fontsize=SIZE)
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    axes.get_xticklabels()[1].set_horizontalalignment("right")
    return image


def draw_panels(figure: Figure) -> None:
    """Draw the panels of KINDS in two rows, with one colour bar."""
    panels = figure.subplots(2, 4)
    for axes, (title, options) in zip(panels.flat, KINDS.items(), strict=True):
        if options is None:
            image = draw(axes, title, in_order(u_vit()))
            axes.text(1, len(axes.images[0].get_array()) - 5, "a learned\nboundary", color="white", fontsize=SIZE)
        else:
            kind = shortcuts(BLOCKS, **{"alpha_min": 1.0, **options})
            image = draw(axes, title, mixing_matrix(kind).numpy())
    figure.supxlabel("source: the input (embeddings), then the branches (and merges) in order", fontsize=SIZE + 1)
    figure.supylabel("input of branch", fontsize=SIZE + 1)
    bar = figure.colorbar(image, ax=panels, shrink=0.8)
    bar.set_label("weight, of the largest in the row", fontsize=SIZE)
    bar.ax.tick_params(labelsize=SIZE)


def main(path: str) -> None:
    """Write the figure."""
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(9, 6), layout="constrained")
        draw_panels(figure)
        figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
