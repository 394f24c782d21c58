"""Draws how_it_works.png, the idea in one figure: `python docs/depth_figure.py docs/how_it_works.png`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from uvit_decay.decay import effective_decay, shortcuts

STYLE = Path(__file__).with_name("figures.mplstyle")
BLOCKS = 12
VALUES = (1.0, 0.9, 0.8, 0.7, 0.6)  # of alpha_min


def branch_weights(alphas: tuple[float, ...]) -> np.ndarray:
    """Return the weight of each branch's output in the state after each branch, (depth, branch); NaN above."""
    count = len(alphas)
    weights = np.full((count, count), np.nan)
    for depth in range(count):
        for branch in range(depth + 1):
            weights[depth, branch] = math.prod(alphas[branch + 1 : depth + 1])
    return weights


def draw_curves(alpha: Axes, left: Axes) -> None:
    """Draw alpha over depth, and what is left of the input there, a curve for each alpha_min."""
    depth = np.arange(2 * BLOCKS + 1) / 2  # in blocks: a branch is half of one
    for alpha_min in VALUES:
        alphas = shortcuts(BLOCKS, alpha_min).alphas
        products = [effective_decay(alphas[:k]) for k in range(len(depth))]
        label = f"{alpha_min:g}"
        alpha.plot(depth[1:], alphas, marker="o", markersize=3, linewidth=1.8, label=label)
        left.semilogy(depth, products, linewidth=1.8, label=label)
    alpha.set(title="alpha of each shortcut", ylim=(0.5, 1.04))
    left.set(title="what is left of the input", ylim=(3e-4, 1.6))
    for axes in (alpha, left):
        axes.set(xlabel="depth in blocks", xticks=range(0, BLOCKS + 1, 2))
        axes.grid(alpha=0.3)
    alpha.legend(title="alpha_min", loc="lower left", ncols=2)


def draw_weights(axes: Axes, alpha_min: float) -> AxesImage:
    """Draw the weight of each branch's output at each depth; return the image, for its colour bar."""
    weights = branch_weights(shortcuts(BLOCKS, alpha_min).alphas)
    image = axes.imshow(weights, vmin=0, vmax=1, origin="lower", extent=(0, BLOCKS, 0, BLOCKS), cmap="viridis")
    ticks = range(0, BLOCKS + 1, 2)
    axes.set(title=f"weight of branch j, alpha_min {alpha_min:g}", xticks=ticks, yticks=ticks)
    axes.set(xlabel="branch j, in blocks", ylabel="depth in blocks")
    return image


def main(path: str) -> None:
    """Write the figure of a network of 12 blocks."""
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(7.2, 6.6), layout="constrained")
        (alpha, left), (plain, decayed) = figure.subplots(2, 2)
        draw_curves(alpha, left)
        draw_weights(plain, 1.0)
        image = draw_weights(decayed, 0.6)
        figure.colorbar(image, ax=[plain, decayed], label="weight", shrink=0.9)
        figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
