"""Tables and figure of the arms of target.sh: gains of the decay and of the skips, by prediction target.

python -m benchmarks.studies.target [--arms benchmarks/studies/arms.csv] [--out docs/target.png]
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import matplotlib.pyplot as plt

from benchmarks.studies.mae_rate import STYLE
from benchmarks.studies.small_sit import mean_loss, read_accuracies
from benchmarks.table import find_processor

ARMS = Path(__file__).with_name("arms.csv")
BLOCKS = [f"blocks.{i}" for i in range(12)]
HEADER = ("arm", "seed", "steps", "commit", "cpu", "loss", "t", "embeddings", *BLOCKS)
DECIDING = BLOCKS[6:10]  # blocks 7 to 10 in the pages, which count from 1; their mean accuracy is the statistic
DECIDING_TIME = "0.1"
TARGETS = {"v": "velocity", "x": "x"}
CONTROLS = {
    "v_skips_decay": "alpha_min 0.8",
    "v_skips_stream": "1.0, skips of 0.8",
    "v_skips_gain_stream": "gains and skips of 0.8",
    "v_skips_over_gain": "0.8, corrected rates",
}
BySeed = Mapping[str, float]  # seed -> statistic


def read_statistics(arms: Path, steps: int) -> dict[str, dict[str, float]]:
    """Return the statistic of each arm in percent: arm -> seed -> mean accuracy of the DECIDING blocks."""
    found: dict[str, dict[str, float]] = {}
    with arms.open() as file:
        for row in csv.DictReader(file):
            if int(row["steps"]) == steps and row["t"] == DECIDING_TIME:
                accuracy = fmean(float(row[block]) for block in DECIDING)
                found.setdefault(row["arm"], {})[row["seed"]] = 100 * accuracy
    return found


def subtract(arm: BySeed, other: BySeed) -> dict[str, float]:
    """Return the differences of the seeds that both arms have."""
    return {seed: value - other[seed] for seed, value in arm.items() if seed in other}


def summarise(values: BySeed) -> str:
    """Return `mean +- standard error (number of seeds)`, signed; `-` without a seed."""
    if not values:
        return "-"
    mean = fmean(values.values())
    if len(values) == 1:
        return f"{mean:+.1f} (1 seed)"
    error = stdev(values.values()) / math.sqrt(len(values))
    return f"{mean:+.1f} +- {error:.1f} ({len(values)} seeds)"


def find_gains(found: Mapping[str, BySeed]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the gains by name and by target: of the decay with and without skips, and of the skips."""

    def gain(better: str, plain: str) -> dict[str, dict[str, float]]:
        gains = {}
        for target in TARGETS:
            gains[target] = subtract(found.get(f"{target}_{better}", {}), found.get(f"{target}_{plain}", {}))
        return gains

    return {
        "decay, with skips": gain("skips_decay", "skips"),
        "decay, without skips": gain("plain_decay", "plain"),
        "skips": gain("skips", "plain"),
    }


def print_tables(found: Mapping[str, BySeed]) -> None:
    """Print the accuracies, the gains with their interactions, and the controls."""
    print("| arm | accuracy by seed, % |\n| --- | --- |")
    for arm, values in found.items():
        print(f"| {arm} | {', '.join(f'{seed}: {value:.1f}' for seed, value in sorted(values.items()))} |")
    print("\n| gain, points | velocity | x | interaction |\n| --- | --- | --- | --- |")
    for name, gains in find_gains(found).items():
        interaction = subtract(gains["v"], gains["x"])
        print(f"| {name} | {summarise(gains['v'])} | {summarise(gains['x'])} | {summarise(interaction)} |")
    print("\n| velocity, with skips | against 1.0 | against 0.8 |\n| --- | --- | --- |")
    for arm, name in CONTROLS.items():
        values = found.get(arm, {})
        plain = subtract(values, found.get("v_skips", {}))
        decayed = subtract(values, found.get("v_skips_decay", {}))
        print(f"| {name} | {summarise(plain)} | {summarise(decayed)} |")


def draw(found: Mapping[str, BySeed], out: Path) -> None:
    """Draw the gains of each seed under both targets, a panel for each gain."""
    gains = find_gains(found)
    with plt.rc_context(fname=STYLE):
        figure, panels = plt.subplots(1, len(gains), figsize=(7.4, 2.6), sharey=True, layout="constrained")
        for axes, (name, by_target) in zip(panels, gains.items(), strict=True):
            draw_gain(axes, by_target)
            axes.set_title(name)
        panels[0].set_ylabel("gain in accuracy, points")
        figure.savefig(out, dpi=120)


def draw_gain(axes: plt.Axes, by_target: Mapping[str, BySeed]) -> None:
    """Draw one point per seed and target, and a line for each seed that has both."""
    axes.axhline(0, color="0.7", linewidth=0.8)
    for seed in sorted({seed for values in by_target.values() for seed in values}):
        places = [i for i, target in enumerate(TARGETS) if seed in by_target[target]]
        heights = [by_target[target][seed] for target in TARGETS if seed in by_target[target]]
        axes.plot(places, heights, marker="o", label=f"seed {seed}")
    axes.set_xticks(range(len(TARGETS)), TARGETS.values())
    axes.set_xlim(-0.4, len(TARGETS) - 0.6)


def add_rows(arms: Path, run: Path, arm: str, seed: int, steps: int) -> None:
    """Add a row for each noise level of a finished arm to the table, and its header to a new one."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    about = [arm, seed, steps, commit.stdout.strip(), find_processor(), f"{mean_loss(run, steps):.5f}"]
    is_new = not arms.exists()
    with arms.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(HEADER)
        for time, accuracies in read_accuracies(run / f"probes_{steps}" / "probes.csv").items():
            writer.writerow([*about, time, *(f"{accuracy:.4f}" for accuracy in accuracies)])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", type=Path, default=ARMS)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="the figure")
    parser.add_argument("--add", type=Path, metavar="RUN", help="add the rows of a run folder")
    parser.add_argument("--arm")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(words)
    if options.add:
        add_rows(options.arms, options.add, options.arm, options.seed, options.steps)
        return
    found = read_statistics(options.arms, options.steps)
    print_tables(found)
    if options.out:
        draw(found, options.out)


if __name__ == "__main__":
    main()
