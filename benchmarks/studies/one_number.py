"""Table and figure of the runs of one_number.sh: features of the last block against -log10 P, by arm.

python -m benchmarks.studies.one_number [--runs runs] [--out runs/one_number.png]
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
import torch

from benchmarks.studies.mae_rate import blocks, print_table
from uvit_decay.checkpoint import load
from uvit_decay.history import read, read_rows

LAST = {
    "test_accuracy": "linear probe",
    "knn_accuracy": "kNN",
    "effective_rank_of_cls": "effective rank",
    "dimensions_of_cls": "dimensions",
    "mean_share": "share of the mean",
}  # columns of probes.csv, of the last block
STEPS = 1000  # runs with fewer are not finished
SHOWN = ("linear probe", "kNN", "dimensions", "share of the mean")


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


def draw(found: dict[str, list[dict[str, float]]], out: Path) -> None:
    """Save a panel for each of SHOWN against -log10 P: a point with the spread of its seeds for each arm."""
    figure, panels = plt.subplots(1, len(SHOWN), figsize=(3.8 * len(SHOWN), 4.2), layout="constrained")
    for panel, name in zip(panels, SHOWN, strict=True):
        for colour, (arm, runs) in enumerate(found.items()):
            values = [run[name] for run in runs]
            spread, marker = stdev(values) if len(values) > 1 else 0.0, "s" if arm.startswith("official") else "o"
            style = {"fmt": marker, "color": plt.get_cmap("tab20")(colour), "capsize": 3}
            panel.errorbar(runs[0]["-log10 P"], mean(values), spread, label=arm, **style)
        panel.set(xlabel="-log10 P", title=name)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("runs/one_number.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = defaultdict(list)
    for run in sorted(options.runs.glob("one_number_*/version_*")):
        if any(measurement.step == STEPS for measurement in read(run / "probes.jsonl")):
            found[run.parent.name.removeprefix("one_number_").rpartition("_")[0]].append(measured(run))
    arms = dict(sorted(found.items(), key=lambda item: item[1][0]["-log10 P"]))
    columns = next(iter(arms.values()))[0]
    print_table(columns, {arm: [list(run.values()) for run in runs] for arm, runs in arms.items()})
    draw(arms, options.out)


if __name__ == "__main__":
    main()
