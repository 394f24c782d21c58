"""Table of the runs of small_sit.sh: linear probes by block and noise level, and the loss, for each arm and seed.

python -m benchmarks.studies.small_sit [STEPS] [--runs runs]
"""

import argparse
import csv
import re
from pathlib import Path
from statistics import mean

from uvit_decay.runs.history import read_rows

TIMES = ("0.1", "0.3")
NAME = re.compile(r"small_sit_([\d.]+)_([\de.-]+)_s(\d+)_?(.*)")


def read_scores(probes: Path, score: str = "test_accuracy") -> dict[str, list[float]]:
    """Return a score of a probe's table by noise level, in the order of the layers."""
    found: dict[str, list[float]] = {time: [] for time in TIMES}
    with probes.open() as file:
        for row in csv.DictReader(file):
            found[f"{float(row['t']):g}"].append(float(row[score]))
    return found


def mean_loss(run: Path, steps: int) -> float:
    """Return the mean training loss of the last 300 of these steps, over all parts of a resumed run."""
    found = {}
    for log in run.parent.glob("version_*/metrics.csv"):
        for step, row in read_rows(log):
            if "train/loss" in row:
                found[step] = float(row["train/loss"])
    return mean(value for step, value in found.items() if steps - 300 <= step < steps)


def print_arm(folder: Path, steps: int) -> None:
    """Print a row for each noise level of one arm: blocks 1 to 12, embeddings left out."""
    alpha_min, rate, seed, control = NAME.fullmatch(folder.name).groups()
    for probes in sorted(folder.glob(f"version_*/probes_{steps}/probes.csv"))[-1:]:
        run = probes.parent.parent
        loss = mean_loss(run, steps)
        for time, accuracies in read_scores(probes).items():
            blocks = " ".join(f"{accuracy:.3f}" for accuracy in accuracies[1:])
            print(f"| {alpha_min} {control} | {rate} | {seed} | t = {time}, loss {loss:.4f} | {blocks} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="?", type=int, default=2000)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    print("| arm | rate | seed | noise level and loss | probes of blocks 1 to 12 |")
    print("| --- | --- | --- | --- | --- |")
    for folder in sorted(options.runs.glob("small_sit_*")):
        print_arm(folder, options.steps)


if __name__ == "__main__":
    main()
