"""Table and figure of the runs of one_number.sh: features of the last block against -log10 P, by arm.

python -m benchmarks.studies.one_number [--runs runs] [--out runs/one_number.png]
python -m benchmarks.studies.one_number --page docs/results_tables.md --out docs/one_number.png   # from its tables
"""

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from benchmarks.studies.mae_rate import STYLE, blocks, print_table, summary
from benchmarks.studies.page_tables import Row, merge_by_arm, parse_cell, read_tables
from uvit_decay.checkpoint import load
from uvit_decay.runs.history import read, read_rows

LAST = {
    "test_accuracy": "linear probe",
    "knn_accuracy": "kNN",
    "spectrum_entropy_of_cls": "entropy of the spectrum",
    "effective_rank_exp_of_cls": "effective rank",
    "mean_share": "share of the mean",
}  # columns of probes.csv, of the last block
STEPS = 1000  # runs with fewer are not finished
SHOWN = ("linear probe", "kNN", "effective rank", "share of the mean")
HEADING = "### One number?"  # of the section of docs/results_tables.md

# Arm -> its words in the legend, colour (Okabe and Ito's palette) and marker; squares have no SkipLayers.
ARMS = {
    "plain": ("plain", "#0072B2", "o"),
    "constant-branch": ("x + sqrt(1/2) f", "#56B4E9", "o"),
    "0.9": ("alpha_min 0.9", "#009E73", "o"),
    "0.8": ("alpha_min 0.8", "#009E73", "^"),
    "0.7": ("alpha_min 0.7", "#009E73", "v"),
    "attention": ("0.7, attention only", "#E69F00", "<"),
    "mlp": ("0.7, MLP only", "#E69F00", ">"),
    "constant": ("sqrt(1/2) (x + f)", "#CC79A7", "o"),
    "gain": ("gain of 0.7", "#D55E00", "o"),
    "official": ("0.7, no SkipLayers", "#009E73", "s"),
    "official_gain": ("gain of 0.7, no SkipLayers", "#D55E00", "s"),
}


def measured(run: Path) -> dict[str, float]:
    """Return the numbers of a finished run, and -log10 P: 0 for plain shortcuts; of `gain` its P."""
    of = blocks(run)
    losses = [float(row["val/loss"]) for _, row in read_rows(run / "metrics.csv") if "val/loss" in row]
    net = load(run / "checkpoints" / "last.ckpt").net
    state = net.state_dict()
    factors = 1 / state["betas"][-1:] if net.config["schedule"] == "gain" else state["alphas"]
    return {
        "-log10 P": abs(factors.double().log10().sum().item()),
        **{title: of[max(of)][name] for name, title in LAST.items()},
        "loss, test": losses[-1],
    }


def draw(found: dict[str, Row], out: Path) -> None:
    """Save a panel for each of SHOWN against -log10 P: a point with the spread of its seeds for each arm."""
    plt.style.use(STYLE)
    figure, grid = plt.subplots(2, 2, figsize=(7, 7.4), layout="constrained", sharex=True)
    for panel, name in zip(grid.flat, SHOWN, strict=True):
        for arm, (label, colour, marker) in ARMS.items():
            if arm not in found:
                continue
            mean, spread = parse_cell(found[arm][name])
            depth, _ = parse_cell(found[arm]["-log10 P"])
            panel.errorbar(depth, mean, spread, label=label, color=colour, fmt=marker, capsize=3)
        panel.set_title(name)
    for panel in grid[1]:
        panel.set_xlabel("-log10 P")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(out)


def read_runs(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return the numbers of the finished runs below a folder by arm, in the order of -log10 P."""
    found = defaultdict(list)
    for run in sorted(folder.glob("one_number_*/version_*")):
        if any(measurement.step == STEPS for measurement in read(run / "probes.jsonl")):
            arm = run.parent.name.removeprefix("one_number_").rpartition("_")[0]
            found[arm].append(measured(run))
    return dict(sorted(found.items(), key=lambda item: item[1][0]["-log10 P"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--page", type=Path, help="draw the published tables of this page instead of runs")
    parser.add_argument("--out", type=Path, default=Path("runs/one_number.png"))
    options = parser.parse_args()
    if options.page:
        draw(merge_by_arm(read_tables(options.page, HEADING)), options.out)
        return
    torch.set_num_threads(1)
    arms = read_runs(options.runs)
    columns = next(iter(arms.values()))[0]
    print_table(columns, {arm: [list(run.values()) for run in runs] for arm, runs in arms.items()})
    cells = {arm: {name: summary([run[name] for run in runs]) for name in columns} for arm, runs in arms.items()}
    draw(cells, options.out)


if __name__ == "__main__":
    main()
