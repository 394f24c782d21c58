"""Table and figure of the runs of mae_rate.sh: probes by block, each arm averaged over its seeds.

python -m benchmarks.studies.mae_rate [STEPS] [--out runs/mae_rate.png]
"""

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt

from uvit_decay.runs.history import read_rows

STYLE = Path("docs/figures.mplstyle")  # of the figures in the documentation
SHOWN = {"test_accuracy": "linear probe", "knn_accuracy": "kNN", "mean_share": "share of the mean"}
COLUMNS = (
    "linear 6",
    "8",
    "10",
    "12",
    "chosen block",
    "kNN 12",
    "centred",
    "effective rank",
    "share of the mean",
    "loss",
)


def arms(runs: Path, steps: int) -> dict[str, list[Path]]:
    """Return the folders of probes after `steps` steps, the newest of each run, by alpha_min, rate and control."""
    found = defaultdict(list)
    for run in sorted(runs.glob("mae_rate_*")):
        alpha_min, rate, control = re.fullmatch(r"mae_rate_([\d.]+)_([\de.-]+)_s\d+_?(.*)", run.name).groups()
        if probed := sorted(run.glob(f"version_*/probes_{steps}/probes.csv")):
            found[" ".join([alpha_min, f"at {rate}", control]).strip()].append(probed[-1].parent)
    return found


def blocks(probes: Path) -> dict[int, dict[str, float]]:
    """Return the scores of each probed block by its number."""
    with (probes / "probes.csv").open() as file:
        return {
            int(row["layer"]): {name: float(row[name]) for name in row if name not in ("name", "kind")}
            for row in csv.DictReader(file)
        }


def loss(probes: Path, steps: int) -> float:
    """Return the mean training loss of the last 1000 of these steps, in all parts of a resumed run."""
    logs = probes.parent.parent.glob("version_*/metrics.csv")
    found = {step: float(row["train/loss"]) for log in logs for step, row in read_rows(log) if "train/loss" in row}
    return mean(value for step, value in found.items() if steps - 1000 <= step < steps)


def numbers(probes: Path, steps: int) -> list[float]:
    """Return the numbers of COLUMNS; the block of `chosen` is the best on held-out training pictures."""
    of = blocks(probes)
    chosen = max(of.values(), key=lambda scores: scores["held_out_accuracy"])
    last = [
        of[12][name] for name in ("knn_accuracy", "knn_centred_accuracy", "effective_rank_exp_of_cls", "mean_share")
    ]
    return [
        *(of[block]["test_accuracy"] for block in (6, 8, 10, 12)),
        chosen["test_accuracy"],
        *last,
        loss(probes, steps),
    ]


def summary(values: list[float]) -> str:
    """Return the mean, and in brackets the standard deviation (n - 1) of several values that differ."""
    spread = f" ({stdev(values):.3f})" if len(set(values)) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def print_table(head: Iterable[str], rows: dict[str, list[Sequence[float]]]) -> None:
    """Print a Markdown table: a row for each arm, with its number of runs and a summary of each of their numbers."""
    titles = ["arm", "n", *head]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for arm, runs in rows.items():
        print(f"| {arm} | {len(runs)} |", *(f"{summary(list(column))} |" for column in zip(*runs, strict=True)))


def draw(found: dict[str, list[Path]], out: Path) -> None:
    """Save a panel for each of SHOWN: mean over the seeds against the block, and a bar of their spread.

    Arms of one seed are left out where others have more.
    """
    found = {arm: folders for arm, folders in found.items() if len(folders) > 1} or found
    plt.style.use(STYLE)
    figure, panels = plt.subplots(1, len(SHOWN), figsize=(4.2 * len(SHOWN), 4.2), layout="constrained")
    for panel, (name, title) in zip(panels, SHOWN.items(), strict=True):
        for arm, folders in found.items():
            of = [blocks(folder) for folder in folders]
            common = sorted(set.intersection(*map(set, of)))  # --layers of the probes may differ
            values = [[scores[block][name] for scores in of] for block in common]
            spread = [stdev(each) if len(each) > 1 else 0.0 for each in values]
            label, line = f"{arm} (n = {len(of)})", "--" if arm.startswith("1.0") else "-"
            panel.errorbar(common, [mean(each) for each in values], spread, label=label, linestyle=line, capsize=2)
        panel.set(xlabel="block", title=title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="?", type=int, default=4000)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("runs/mae_rate.png"))
    options = parser.parse_args()
    found = arms(options.runs, options.steps)
    print_table(COLUMNS, {arm: [numbers(folder, options.steps) for folder in of] for arm, of in found.items()})
    draw(found, options.out)


if __name__ == "__main__":
    main()
