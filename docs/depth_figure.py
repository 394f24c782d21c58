"""Draws how_it_works.png, the idea in one figure: `python docs/depth_figure.py docs/how_it_works.png`."""

from __future__ import annotations

import math
import sys

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from uvit_decay.decay import effective_decay, shortcuts

BLOCKS = 12
VALUES = (1.0, 0.9, 0.8, 0.7, 0.6)  # of alpha_min


def reaching(alphas: tuple[float, ...]) -> np.ndarray:
    """Return the weight of each branch's output in the state after each branch, (depth, branch); none is above it."""
    count = len(alphas)
    weights = np.full((count, count), np.nan)
    for depth in range(count):
        for branch in range(depth + 1):
            weights[depth, branch] = math.prod(alphas[branch + 1 : depth + 1])
    return weights


def draw_curves(alpha: Axes, left: Axes) -> None:
    """Draw alpha over depth, and what is left of the input there, a curve for each alpha_min."""
    depth = np.arange(2 * BLOCKS + 1) / 2  # in blocks: a branch is half of one
    for i, alpha_min in enumerate(VALUES):
        alphas = shortcuts(BLOCKS, alpha_min).alphas
        products = [effective_decay(alphas[:k]) for k in range(len(depth))]
        style = dict(color=colormaps["plasma"](0.8 * i / (len(VALUES) - 1)), label=f"{alpha_min:g}", linewidth=1.8)
        alpha.plot(depth[1:], alphas, marker="o", markersize=3, **style)
        left.semilogy(depth, products, **style)
    alpha.set(title="alpha of each shortcut", ylim=(0.5, 1.04))
    left.set(title="what is left of the input", ylim=(3e-4, 1.6))
    for axes in (alpha, left):
        axes.set(xlabel="depth in blocks", xticks=range(0, BLOCKS + 1, 2))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    alpha.legend(title="alpha_min", frameon=False, loc="lower left", ncols=2)


def main(path: str) -> None:
    """Write the figure of a network of 12 blocks."""
    figure = Figure(figsize=(12, 3.8), layout="constrained", dpi=100)
    alpha, left, matrix = figure.subplots(1, 3)
    draw_curves(alpha, left)
    weights = reaching(shortcuts(BLOCKS, 0.6).alphas)
    image = matrix.imshow(weights, vmin=0, vmax=1, origin="lower", extent=(0, BLOCKS, 0, BLOCKS), cmap="viridis")
    matrix.set(title="weight of branch j at depth l, alpha_min 0.6", xlabel="branch j, in blocks")
    matrix.set(ylabel="depth l, in blocks", xticks=range(0, BLOCKS + 1, 2), yticks=range(0, BLOCKS + 1, 2))
    figure.colorbar(image, label="weight")
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
