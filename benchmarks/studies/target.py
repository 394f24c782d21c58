"""Tables and figure of the arms of target.sh: gains of the decay and of the skips, by prediction target.

python -m benchmarks.studies.target [--tables benchmarks/studies] [--steps 2000] [--out docs/target.png]

The folder of tables has arms.csv (probe accuracies), noise_share.csv and samples.csv, with rows of each arm and seed.
Rows that target.sh writes are in all three.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import matplotlib.pyplot as plt
import torch

from benchmarks.studies.mae_rate import STYLE
from benchmarks.studies.small_sit import mean_loss, read_scores
from benchmarks.table import find_processor

TABLES = Path(__file__).parent
ACCURACY = "arms.csv"
NOISE_SHARE = "noise_share.csv"
SAMPLES = "samples.csv"
BLOCKS = [f"blocks.{i}" for i in range(12)]
ABOUT = ("arm", "seed", "steps", "commit", "cpu")
SAMPLE_VALUES = ("fd", "label_consistency")
HEADERS = {
    ACCURACY: (*ABOUT, "loss", "t", "embeddings", *BLOCKS),
    NOISE_SHARE: (*ABOUT, "t", "embeddings", *BLOCKS),
    SAMPLES: (*ABOUT, *SAMPLE_VALUES),
}
DECIDING = slice(6, 10)  # blocks 7 to 10 in the pages, which count from 1; their mean is the statistic
DECIDING_TIME = {ACCURACY: "0.1", NOISE_SHARE: "0.3"}
OTHER_TIME = "0.3"  # of accuracies: reported, decides nothing
TARGETS = {"v": "velocity", "x": "x"}
WIRINGS = {"skips": "with skips", "plain": "without skips"}
PANELS = {ACCURACY: "accuracy at t = 0.1, %", NOISE_SHARE: "noise share at t = 0.3, %"}
GAINS = "gain of the decay, points"
COLOURS = {"v": "C0", "x": "C4"}
LINES = {("", "1.0"): "--", ("_decay", "0.8"): "-"}  # by the end of the arm's name and its alpha_min
MARKERS = "osD^v"  # by seed
CONTROLS = {
    "v_skips_decay": "alpha_min 0.8",
    "v_skips_stream": "1.0, skips of 0.8",
    "v_skips_gain_stream": "gains and skips of 0.8",
    "v_skips_over_gain": "0.8, corrected rates",
}
RATES = ("1e-3", "2e-3", "4e-3")
BySeed = Mapping[str, float]  # seed -> statistic
ByArm = Mapping[str, BySeed]


def read_rows(tables: Path, table: str, steps: int) -> Iterator[dict[str, str]]:
    """Yield the rows of a table for arms of this length; none without the table."""
    path = tables / table
    if not path.exists():
        return
    with path.open() as file:
        for row in csv.DictReader(file):
            if int(row["steps"]) == steps:
                yield row


def read_blocks(tables: Path, table: str, steps: int, time: str | None = None) -> dict[str, dict[str, list[float]]]:
    """Return the values of the blocks at a time, arm -> seed -> values; empty without the table.

    The time is the table's DECIDING_TIME unless it is given.
    """
    time = time or DECIDING_TIME[table]
    found: dict[str, dict[str, list[float]]] = {}
    for row in read_rows(tables, table, steps):
        if row["t"] == time:
            found.setdefault(row["arm"], {})[row["seed"]] = [float(row[block]) for block in BLOCKS]
    return found


def read_statistics(tables: Path, table: str, steps: int, time: str | None = None) -> dict[str, dict[str, float]]:
    """Return the means of the DECIDING blocks in percent, arm -> seed -> mean; empty without the table."""
    found = {}
    for arm, by_seed in read_blocks(tables, table, steps, time).items():
        found[arm] = {seed: 100 * fmean(values[DECIDING]) for seed, values in by_seed.items()}
    return found


def read_best(tables: Path, steps: int) -> dict[str, dict[str, float]]:
    """Return the accuracies of each arm's best block in percent, arm -> seed -> accuracy: biased upwards."""
    found = {}
    for arm, by_seed in read_blocks(tables, ACCURACY, steps).items():
        found[arm] = {seed: 100 * max(values) for seed, values in by_seed.items()}
    return found


def read_column(tables: Path, table: str, column: str, steps: int) -> dict[str, dict[str, float]]:
    """Return the values of a column, arm -> seed -> value; empty without the table."""
    found: dict[str, dict[str, float]] = {}
    for row in read_rows(tables, table, steps):
        found.setdefault(row["arm"], {})[row["seed"]] = float(row[column])
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


def find_gains(found: ByArm) -> dict[str, dict[str, dict[str, float]]]:
    """Return the gains by name and by target: of the decay with and without skips, and of the skips."""

    def gain(better: str, plain: str) -> dict[str, dict[str, float]]:
        gains = {}
        for target in TARGETS:
            gains[target] = subtract(found.get(f"{target}_{better}", {}), found.get(f"{target}_{plain}", {}))
        return gains

    with_skips = gain("skips_decay", "skips")
    without = gain("plain_decay", "plain")
    return {
        "decay, with skips": with_skips,
        "decay, without skips": without,
        "difference of these two": {target: subtract(with_skips[target], without[target]) for target in TARGETS},
        "skips": gain("skips", "plain"),
    }


def print_arms(tables: Path, steps: int) -> None:
    """Print every measurement of each arm: a value for each seed in ascending order, `-` where it is missing."""
    accuracies = read_statistics(tables, ACCURACY, steps)
    columns = [  # values and their number of decimals
        (accuracies, 1),
        (read_statistics(tables, NOISE_SHARE, steps), 1),
        (read_column(tables, ACCURACY, "loss", steps), 4),
        (read_column(tables, SAMPLES, "fd", steps), 1),
        (read_column(tables, SAMPLES, "label_consistency", steps), 3),
    ]
    seeds = sorted({seed for by_seed in accuracies.values() for seed in by_seed})
    print(
        f"| arm, seeds {', '.join(seeds)} | accuracy, % | noise share, % | loss | FD of samples | label consistency |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for arm in accuracies:
        cells = [f"`{arm}`"]
        for column, places in columns:
            found = column.get(arm, {})
            values = [f"{found[seed]:.{places}f}" if seed in found else "-" for seed in seeds]
            cells.append(", ".join(values) if found else "-")
        print(f"| {' | '.join(cells)} |")


def print_gains(found: ByArm, what: str) -> None:
    """Print the gains of a statistic under both targets, and their interaction."""
    print(f"\n| {what}, points | velocity | x | interaction |\n| --- | --- | --- | --- |")
    for name, gains in find_gains(found).items():
        interaction = subtract(gains["v"], gains["x"])
        print(f"| {name} | {summarise(gains['v'])} | {summarise(gains['x'])} | {summarise(interaction)} |")


def print_target(tables: Path, steps: int) -> None:
    """Print the tables of target, skips, decay and parts of the decay, which the pages of results show."""
    print_arms(tables, steps)
    print_gains(read_statistics(tables, ACCURACY, steps), "gain in accuracy")
    print_gains(read_statistics(tables, ACCURACY, steps, OTHER_TIME), f"at t = {OTHER_TIME}")
    print_gains(read_best(tables, steps), "at the best block of each arm")
    print_gains(read_statistics(tables, NOISE_SHARE, steps), "change of the noise share")
    print_controls(read_statistics(tables, ACCURACY, steps), "part of the decay, accuracy")
    print_controls(read_statistics(tables, ACCURACY, steps, OTHER_TIME), f"part of the decay, t = {OTHER_TIME}")
    print_controls(read_best(tables, steps), "part of the decay, best block")
    print_controls(read_statistics(tables, NOISE_SHARE, steps), "part of the decay, noise share")


def print_controls(found: ByArm, what: str) -> None:
    """Print the parts of the decay beside the network without it and the whole decay."""
    print(f"\n| {what}, points | against 1.0 | against 0.8 |\n| --- | --- | --- |")
    for arm, name in CONTROLS.items():
        values = found.get(arm, {})
        plain = subtract(values, found.get("v_skips", {}))
        decayed = subtract(values, found.get("v_skips_decay", {})) if arm != "v_skips_decay" else {}
        print(f"| {name} | {summarise(plain)} | {summarise(decayed)} |")


def at_rates(found: ByArm, arm: str) -> list[BySeed]:
    """Return the statistics of an arm at each of the RATES; that of the study has no suffix."""
    return [found.get(arm if rate == "2e-3" else f"{arm}_{rate}", {}) for rate in RATES]


def print_rates(found: ByArm) -> None:
    """Print the gain of the decay at each learning rate, and between the best rates of both, by their means."""
    plain = at_rates(found, "v_skips")
    decayed = at_rates(found, "v_skips_decay")
    print("\n| learning rate | 0.8 against 1.0 |\n| --- | --- |")
    for rate, values, other in zip(RATES, decayed, plain, strict=True):
        print(f"| {rate} | {summarise(subtract(values, other))} |")
    if all([*plain, *decayed]):
        best = max(decayed, key=lambda values: fmean(values.values()))
        best_plain = max(plain, key=lambda values: fmean(values.values()))
        print(f"| each at its best | {summarise(subtract(best, best_plain))} |")
    muon = subtract(found.get("v_skips_decay_muon", {}), found.get("v_skips_muon", {}))
    print(f"| Muon, 5e-3 | {summarise(muon)} |")


def print_output_skips(found: ByArm) -> None:
    """Print the gain of the learned output skip for each of the four networks that predict the velocity."""
    print("\n| velocity | learned output skip |\n| --- | --- |")
    for arm in ("v_skips", "v_skips_decay", "v_plain", "v_plain_decay"):
        gain = subtract(found.get(f"{arm}_output", {}), found.get(arm, {}))
        print(f"| {arm} | {summarise(gain)} |")


def draw(tables: Path, steps: int, out: Path) -> None:
    """Draw accuracies and noise shares over depth, and the gain of the decay of each seed, with skips and without."""
    gains = find_gains(read_statistics(tables, ACCURACY, steps))
    with plt.rc_context(fname=STYLE):
        figure, rows = plt.subplots(2, 3, figsize=(8.2, 5.2), sharex="col", sharey="col", layout="constrained")
        for row, (wiring, words) in zip(rows, WIRINGS.items(), strict=True):
            for axes, (table, name) in zip(row, PANELS.items(), strict=False):
                draw_depth(axes, tables, table, wiring, steps)
                if axes.get_subplotspec().is_first_row():
                    axes.set_title(name, fontsize=10)
            draw_gains(row[2], gains[f"decay, {words}"])
            row[0].set_ylabel(words)
        rows[0, 2].set_title(GAINS, fontsize=10)
        for axes in rows[1, :2]:
            axes.set_xlabel("block")
        curves, names = rows[0, 0].get_legend_handles_labels()
        points, seeds = rows[0, 2].get_legend_handles_labels()
        figure.legend([*curves, *points], [*names, *seeds], loc="outside lower center", ncols=4)
        figure.savefig(out, dpi=120)


def draw_depth(axes: plt.Axes, tables: Path, table: str, wiring: str, steps: int) -> None:
    """Draw the values of each block, in percent: the means of each arm of this wiring over the seeds that all have.

    The blocks whose mean is the statistic are shaded.
    """
    found = read_blocks(tables, table, steps)
    styles = {}
    for target, colour in COLOURS.items():
        for (suffix, alpha_min), line in LINES.items():
            styles[f"{target}_{wiring}{suffix}"] = (colour, line, f"{TARGETS[target]}, alpha_min {alpha_min}")
    drawn = {arm: found[arm] for arm in styles if arm in found}
    for arm, by_seed in drawn.items():
        shared = [values for seed, values in by_seed.items() if all(seed in other for other in drawn.values())]
        means = [100 * fmean(values) for values in zip(*shared, strict=True)]
        colour, line, label = styles[arm]
        axes.plot(range(1, len(means) + 1), means, color=colour, linestyle=line, label=label)
    axes.axvspan(DECIDING.start + 0.5, DECIDING.stop + 0.5, color="0.5", alpha=0.12, linewidth=0)
    axes.set_xticks(range(2, len(BLOCKS) + 1, 2))


def draw_gains(axes: plt.Axes, by_target: ByArm) -> None:
    """Draw one point per seed and target, and a line for each seed that has both."""
    axes.axhline(0, color="0.5", linewidth=0.8)
    for seed in sorted({seed for values in by_target.values() for seed in values}):
        places = [i for i, target in enumerate(TARGETS) if seed in by_target[target]]
        heights = [by_target[target][seed] for target in TARGETS if seed in by_target[target]]
        axes.plot(places, heights, color="0.5", marker=MARKERS[int(seed) % len(MARKERS)], label=f"seed {seed}")
    axes.set_xticks(range(len(TARGETS)), TARGETS.values())
    axes.set_xlim(-0.4, len(TARGETS) - 0.6)


def add_rows(tables: Path, run: Path, arm: str, seed: int, steps: int) -> None:
    """Add the rows of a finished arm to the three tables: the accuracies last, because they say that it is finished."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    cpu = f"{find_processor()} ({torch.backends.cpu.get_cpu_capability()})"  # one name may stand for several models
    about = [arm, seed, steps, commit.stdout.strip(), cpu]
    loss = f"{mean_loss(run, steps):.5f}"
    report = json.loads((run / f"samples_{steps}.json").read_text())
    append(tables, SAMPLES, [[*about, *(f"{report['values'][name]:.4f}" for name in SAMPLE_VALUES)]])
    probes = run / f"probes_{steps}" / "probes.csv"
    for table, score, further in ((NOISE_SHARE, "noise_share", []), (ACCURACY, "test_accuracy", [loss])):
        rows = []
        for time, values in read_scores(probes, score).items():
            rows.append([*about, *further, time, *(f"{value:.4f}" for value in values)])
        append(tables, table, rows)


def append(tables: Path, table: str, rows: Sequence[Sequence[object]]) -> None:
    """Add rows to a table, and its header to a new one."""
    path = tables / table
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(HEADERS[table])
        writer.writerows(rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of arms.csv, noise_share.csv, samples.csv")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="the figure")
    parser.add_argument("--add", type=Path, metavar="RUN", help="add the rows of a run folder")
    parser.add_argument("--arm")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(words)
    if options.add:
        add_rows(options.tables, options.add, options.arm, options.seed, options.steps)
        return
    print_target(options.tables, options.steps)
    accuracies = read_statistics(options.tables, ACCURACY, options.steps)
    print_rates(accuracies)
    print_output_skips(accuracies)
    if options.out:
        draw(options.tables, options.steps, options.out)


if __name__ == "__main__":
    main()
