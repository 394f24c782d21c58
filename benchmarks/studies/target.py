"""Tables and figure of the arms of target.sh: gains of the decay and of the skips, by prediction target.

python -m benchmarks.studies.target [--tables benchmarks/studies] [--steps 2000] [--out docs/target.png]

The folder of tables has arms.csv (probe accuracies), noise_share.csv and samples.csv, with rows of each arm and seed.
Rows that target.sh writes are in all three. Its folder `confirm` has the same tables of fresh seeds (confirm.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

from benchmarks.studies import confirm
from benchmarks.studies.arm_tables import (
    ACCURACY,
    BLOCKS,
    DECIDING,
    NOISE_SHARE,
    TABLES,
    ByArm,
    BySeed,
    add_rows,
    print_arms,
    read_best,
    read_blocks,
    read_statistics,
    subtract,
    summarise,
)
from benchmarks.studies.mae_rate import STYLE

FRESH = "confirm"  # folder of the tables of fresh seeds, beside the others
OTHER_TIME = "0.3"  # of accuracies: reported, decides nothing
TARGETS = {"v": "velocity", "x": "x"}
WIRINGS = {"skips": "with skips", "plain": "without skips"}
PANELS = {ACCURACY: "accuracy at t = 0.1, %", NOISE_SHARE: "noise share at t = 0.3, %"}
CHOSEN_ON = "0"  # the seed of the runs that chose the deciding blocks
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


def print_gains(found: ByArm, what: str) -> None:
    """Print the gains of a statistic under both targets, and their interaction."""
    print(f"\n| {what}, points | velocity | x | interaction |\n| --- | --- | --- | --- |")
    for name, gains in find_gains(found).items():
        interaction = subtract(gains["v"], gains["x"])
        print(f"| {name} | {summarise(gains['v'])} | {summarise(gains['x'])} | {summarise(interaction)} |")


def print_target(tables: Path, steps: int) -> None:
    """Print the tables of target, skips, decay and parts of the decay, which the pages of results show."""
    accuracies = read_statistics(tables, ACCURACY, steps)
    print_arms(tables, steps)
    print_gains(accuracies, "gain in accuracy")
    print_gains(read_statistics(tables, ACCURACY, steps, OTHER_TIME), f"at t = {OTHER_TIME}")
    print_gains(read_best(tables, steps), "at the best block of each arm")
    print_gains(read_statistics(tables, NOISE_SHARE, steps), "change of the noise share")
    print_controls(accuracies, "part of the decay, accuracy")
    print_controls(read_statistics(tables, ACCURACY, steps, OTHER_TIME), f"part of the decay, t = {OTHER_TIME}")
    print_controls(read_best(tables, steps), "part of the decay, best block")
    print_controls(read_statistics(tables, NOISE_SHARE, steps), "part of the decay, noise share")
    print_controls(leave_out(accuracies, CHOSEN_ON), f"part of the decay, without seed {CHOSEN_ON}")


def leave_out(found: ByArm, seed: str) -> dict[str, dict[str, float]]:
    """Return the statistics of all other seeds."""
    rest = {}
    for arm, by_seed in found.items():
        rest[arm] = {other: value for other, value in by_seed.items() if other != seed}
    return rest


def print_controls(found: ByArm, what: str) -> None:
    """Print the parts of the decay beside the network without it and the whole decay."""
    print(f"\n| {what}, points | against 1.0 | against 0.8 |\n| --- | --- | --- |")
    for arm, name in CONTROLS.items():
        if arm not in found:
            continue
        values = found[arm]
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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of arms.csv, noise_share.csv, samples.csv")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="the figure of targets, skips and decay")
    parser.add_argument("--rates-out", type=Path, help="the figure of the fresh seeds")
    parser.add_argument("--add", type=Path, metavar="RUN", help="add the rows of a run folder")
    parser.add_argument("--arm")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(words)
    if options.add:
        add_rows(options.tables, options.add, options.arm, options.seed, options.steps)
        return
    if (options.tables / ACCURACY).exists():
        print_target(options.tables, options.steps)
        accuracies = read_statistics(options.tables, ACCURACY, options.steps)
        print_rates(accuracies)
        print_output_skips(accuracies)
    fresh = options.tables / FRESH
    if (fresh / ACCURACY).exists():
        confirm.print_tables(fresh, options.steps)
    if options.out:
        draw(options.tables, options.steps, options.out)
    if options.rates_out:
        confirm.draw(fresh, options.steps, options.rates_out)


if __name__ == "__main__":
    main()
