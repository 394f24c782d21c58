"""Draw figures of docs/results.md from the tables of docs/results_tables.md: mae_rate.png and others.

python -m benchmarks.studies.page_figures [--page docs/results_tables.md] [--out docs]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.studies.mae_rate import STYLE
from benchmarks.studies.page_tables import Row, merge_by_arm, parse_cell, read_tables

MAE = "### The learning rate is part of the comparison"
BLOCKS = (8, 10, 12)
LAST = ("kNN", "effective rank", "share of the mean")  # columns of the last block
# Arm at a learning rate of 5e-4 -> its words, colour and marker. Arms of three seeds are drawn by block, too.
ARMS = {
    "1.0 at 5e-4": ("plain", "#0072B2", "o"),
    "0.9 at 5e-4": ("alpha_min 0.9", "#009E73", "v"),
    "0.8 at 5e-4": ("alpha_min 0.8", "#D55E00", "s"),
    "0.7 at 5e-4": ("alpha_min 0.7", "#009E73", "v"),
    "0.6 at 5e-4": ("alpha_min 0.6", "#009E73", "v"),
    "0.8 at 5e-4 gain": ("gain of 0.8", "#CC79A7", "D"),
    "0.8 at 5e-4 over_gain": ("0.8, over_gain", "#E69F00", "^"),
}

RESNET = "## The rank of ResNets"
SCORES = {
    "top-1, test": "top-1 accuracy",
    "entropy of the spectrum": "entropy of the spectrum",
    "effective rank": "effective rank",
}
KINDS = {"1.0": ("plain", "#0072B2", "o"), "0.7": ("alpha_min 0.7", "#D55E00", "s")}  # by alpha_min

DIGITS = "## Four values of alpha_min on digits"
DIGITS_SCORES = {
    "best probe": "best linear probe",
    "kNN, middle block": "kNN, middle block",
    "entropy, middle block": "entropy of the spectrum, middle block",
    "FD (small-cnn)": "FD (small-cnn)",
}


def draw_curve(axes: Axes, places: Sequence[float], cells: Sequence[str], **look: str) -> None:
    """Draw the means of cells at these places as a curve, with a bar for each deviation."""
    numbers = [parse_cell(cell) for cell in cells]
    means = [mean for mean, _ in numbers]
    deviations = [deviation for _, deviation in numbers]
    axes.errorbar(places, means, deviations, capsize=3, **look)


def draw_blocks(axes: Axes, arms: dict[str, Row]) -> None:
    """Draw the linear probe by block of the arms with several seeds, shifted a little so that the bars stay apart."""
    shift = -0.15
    for arm, (label, colour, marker) in ARMS.items():
        cells = [arms[arm][f"block {block}"] for block in BLOCKS]
        if any(parse_cell(cell)[1] for cell in cells):
            places = [block + shift for block in BLOCKS]
            draw_curve(axes, places, cells, label=label, color=colour, marker=marker)
            shift += 0.1
    axes.set(title="linear probe, mean of three seeds", xlabel="block", xticks=BLOCKS)
    axes.grid(alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_last(axes: Axes, arms: dict[str, Row], column: str) -> None:
    """Draw a number of the last block, a line for each arm."""
    for place, (arm, (_, colour, marker)) in enumerate(ARMS.items()):
        mean, deviation = parse_cell(arms[arm][column])
        axes.errorbar(mean, place, xerr=deviation, color=colour, marker=marker, capsize=3)
    labels = [label for label, _, _ in ARMS.values()]
    axes.set_title(column)
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(alpha=0.25)


def draw_mae(page: Path, out: Path) -> None:
    """Save the figure of the small MAE: linear probes by block, and the other numbers of the last block."""
    arms = merge_by_arm(read_tables(page, MAE))
    figure = Figure(figsize=(7.2, 6), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    draw_blocks(upper.subplots(), arms)
    panels = lower.subplots(1, len(LAST), sharey=True)
    for axes, column in zip(panels, LAST, strict=True):
        draw_last(axes, arms, column)
    panels[0].invert_yaxis()
    panels[1].set_xlabel("last block; points without a bar are single runs")
    figure.savefig(out)


def draw_resnets(page: Path, out: Path) -> None:
    """Save the figure of the ResNets: accuracy, entropy and effective rank against the number of blocks."""
    rows = read_tables(page, RESNET)
    figure = Figure(figsize=(7.2, 3), layout="constrained")
    panels = figure.subplots(1, len(SCORES))
    for axes, (column, title) in zip(panels, SCORES.items(), strict=True):
        for alpha_min, (label, colour, marker) in KINDS.items():
            chosen = [row for row in rows if row["alpha_min"] == alpha_min]
            depths = [int(row["residual blocks"]) for row in chosen]
            cells = [row[column] for row in chosen]
            draw_curve(axes, depths, cells, label=label, color=colour, marker=marker)
        axes.set(title=title, xlabel="residual blocks", xticks=depths)
        axes.grid(alpha=0.25)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS))
    figure.savefig(out)


def draw_digits(page: Path, out: Path) -> None:
    """Save the figure of the digits: probe, kNN, entropy of the spectrum and FD against alpha_min."""
    rows = read_tables(page, DIGITS)
    values = [float(row["alpha_min"]) for row in rows]
    figure = Figure(figsize=(7.2, 5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for axes, (column, title) in zip(panels.flat, DIGITS_SCORES.items(), strict=True):
        draw_curve(axes, values, [row[column] for row in rows], color="#0072B2", marker="o")
        axes.set(title=title, xticks=values)
        axes.grid(alpha=0.25)
    for axes in panels[1]:
        axes.set_xlabel("alpha_min (1.0 is the plain network)")
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=Path("docs/results_tables.md"))
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the figures")
    options = parser.parse_args()
    with matplotlib.rc_context(fname=STYLE):
        draw_mae(options.page, options.out / "mae_rate.png")
        draw_resnets(options.page, options.out / "resnet_depth.png")
        draw_digits(options.page, options.out / "digits_compare.png")


if __name__ == "__main__":
    main()
