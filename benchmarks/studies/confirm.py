"""Tables and figure of the arms on fresh seeds: confirmation, learning rates, other scales and controls.

`python -m benchmarks.studies.target` prints them from the folder `confirm` of its tables; docs/results.md has the plan.
Arms are compared in pairs of one seed and one CPU model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import matplotlib.pyplot as plt

from benchmarks.studies import arm_tables
from benchmarks.studies.mae_rate import STYLE

RATES = ("5e-4", "1e-3", "2e-3", "4e-3", "8e-3")
RATE = "2e-3"  # of the confirmation; arms at other rates have it at the end of their names
ARMS = {"v_skips": "1.0", "v_skips_decay": "0.8", "v_skips_stream": "1.0, skips of 0.8"}
SCALES = {
    "v_skips_stream_0.6": "1.0, skips of 0.6",
    "v_skips_twice": "1.0, skips twice",
    "v_skips_four": "1.0, skips four times",
}
CONTROLS = {
    "v_skips_start": "1.0, larger start of the skips",
    "v_skips_no_bias": "1.0, skips of 0.8 without biases",
}
NAMES = ARMS | SCALES | CONTROLS
Pair = tuple[str, str]  # seed and CPU model
ByArm = Mapping[str, Mapping[Pair, float]]


class Measure(NamedTuple):
    """A column of the tables: its heading, the decimals of a difference, and the values of the arms."""

    heading: str
    decimals: int
    values: ByArm


def read_pairs(tables: Path, table: str, steps: int, columns: Iterable[str], time: str | None = None) -> ByArm:
    """Return the means of some columns of a table: arm -> (seed, CPU) -> mean; only rows of `time`, if it is given."""
    found: dict[str, dict[Pair, float]] = {}
    for row in arm_tables.read_rows(tables, table, steps):
        if time is None or row["t"] == time:
            values = [float(row[column]) for column in columns]
            found.setdefault(row["arm"], {})[row["seed"], row["cpu"]] = fmean(values)
    return found


def read_measures(tables: Path, steps: int) -> list[Measure]:
    """Return the first statistic (accuracy), the noise share, and the second statistic (FD and label consistency)."""
    blocks = arm_tables.BLOCKS[arm_tables.DECIDING]
    accuracy = read_pairs(tables, arm_tables.ACCURACY, steps, blocks, arm_tables.DECIDING_TIME[arm_tables.ACCURACY])
    share = read_pairs(tables, arm_tables.NOISE_SHARE, steps, blocks, arm_tables.DECIDING_TIME[arm_tables.NOISE_SHARE])
    return [
        Measure("accuracy, points", 1, _in_percent(accuracy)),
        Measure("noise share, points", 1, _in_percent(share)),
        Measure("FD", 2, read_pairs(tables, arm_tables.SAMPLES, steps, ["fd"])),
        Measure(
            "label consistency, points",
            1,
            _in_percent(read_pairs(tables, arm_tables.SAMPLES, steps, ["label_consistency"])),
        ),
    ]


def _in_percent(found: ByArm) -> ByArm:
    return {arm: {pair: 100 * value for pair, value in values.items()} for arm, values in found.items()}


def compare(found: ByArm, arm: str, other: str) -> dict[Pair, float]:
    """Return the differences of two arms, of the seeds and CPUs that both have."""
    return arm_tables.subtract(found.get(arm, {}), found.get(other, {}))


def print_differences(title: str, pairs: Iterable[tuple[str, str, str]], measures: Iterable[Measure]) -> None:
    """Print a row (name, arm, other arm) for each pair of arms that have runs in common; nothing if none has."""
    rows = []
    for name, arm, other in pairs:
        cells = []
        for measure in measures:
            difference = compare(measure.values, arm, other)
            cells.append(arm_tables.summarise(difference, measure.decimals))
        if cells[0] != "-":
            rows.append(f"| {name} | {' | '.join(cells)} |")
    if rows:
        print(f"\n| {title} | {' | '.join(measure.heading for measure in measures)} |")
        print("| --- " * (1 + len(measures)) + "|")
        print("\n".join(rows))


def at_rate(arm: str, rate: str) -> str:
    """Return the name of an arm at a learning rate."""
    return arm if rate == RATE else f"{arm}_{rate}"


def find_rates(found: ByArm) -> list[str]:
    """Return the rates at which all three arms have runs, in ascending order."""
    return [rate for rate in RATES if all(at_rate(arm, rate) in found for arm in ARMS)]


def find_shared(found: ByArm, names: Iterable[str]) -> list[Pair]:
    """Return the seeds and CPUs that all these arms have."""
    sets = [set(found[name]) for name in names]
    return sorted(set.intersection(*sets))


def mean_at(found: ByArm, name: str, shared: Iterable[Pair]) -> float:
    return fmean(found[name][pair] for pair in shared)


def find_best_rates(found: ByArm) -> dict[str, str]:
    """Return the rate with the best mean of each arm, over the runs that all arms have at all rates.

    Empty with a single rate, or without a run in common.
    """
    rates = find_rates(found)
    shared = find_shared(found, [at_rate(arm, rate) for arm in ARMS for rate in rates]) if len(rates) > 1 else []
    if not shared:
        return {}
    return {arm: max(rates, key=lambda rate: mean_at(found, at_rate(arm, rate), shared)) for arm in ARMS}


def print_rates(accuracy: ByArm) -> None:
    """Print the mean accuracy of each arm at each rate, over the seeds and CPUs that the three arms share there."""
    print(f"\n| learning rate | {' | '.join(ARMS.values())} | seeds |\n| --- | --- | --- | --- | --- |")
    for rate in find_rates(accuracy):
        names = [at_rate(arm, rate) for arm in ARMS]
        shared = find_shared(accuracy, names)
        means = [f"{mean_at(accuracy, name, shared):.1f}" for name in names]
        print(f"| {rate} | {' | '.join(means)} | {', '.join(seed for seed, _ in shared)} |")
    best = find_best_rates(accuracy)
    if best:
        print(f"| best rate | {' | '.join(best.values())} | |")


def print_tables(tables: Path, steps: int) -> None:
    """Print the tables of the fresh seeds, which docs/results.md shows."""
    measures = read_measures(tables, steps)
    accuracy = measures[0].values
    arm_tables.print_arms(tables, steps)
    plain, decayed, stream = ARMS
    confirmation = [
        ("0.8 against 1.0", decayed, plain),
        ("1.0, skips of 0.8 against 1.0", stream, plain),
        ("1.0, skips of 0.8 against 0.8", stream, decayed),
    ]
    print_differences(f"at {RATE}", confirmation, measures)
    rates = [rate for rate in find_rates(accuracy) if rate != RATE]
    for rate in rates:
        there = [(name, at_rate(arm, rate), at_rate(other, rate)) for name, arm, other in confirmation]
        print_differences(f"at {rate}", there, measures)
    if rates:
        print_rates(accuracy)
    best = find_best_rates(accuracy)
    if best:
        there = [(name, at_rate(arm, best[arm]), at_rate(other, best[other])) for name, arm, other in confirmation]
        print_differences("each arm at its best rate", there, measures)
    for title, group, others in (("other scales", SCALES, (plain, decayed)), ("controls", CONTROLS, (plain, stream))):
        pairs = []
        for arm, name in group.items():
            pairs += [(f"{name} against {ARMS[other]}", arm, other) for other in others]
        print_differences(title, pairs, measures)


def draw(tables: Path, steps: int, out: Path) -> None:
    """Draw accuracy and FD of the three arms at each learning rate: means and standard errors over seeds."""
    measures = read_measures(tables, steps)
    rates = find_rates(measures[0].values)
    with plt.rc_context(fname=STYLE):
        figure, both = plt.subplots(1, 2, figsize=(7.2, 3.2), layout="constrained")
        for axes, measure, title in zip(
            both, (measures[0], measures[2]), ("probe accuracy, %", "FD of samples"), strict=True
        ):
            for offset, (arm, name) in enumerate(ARMS.items()):
                draw_arm(axes, measure.values, arm, rates, name, 0.06 * (offset - 1))
            axes.set_xticks(range(len(rates)), rates)
            axes.set_xlim(-0.5, len(rates) - 0.5)
            axes.set_xlabel("learning rate")
            axes.set_title(title, fontsize=10)
        figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(out, dpi=120)


def draw_arm(axes: plt.Axes, found: ByArm, arm: str, rates: list[str], label: str, offset: float) -> None:
    """Draw the mean and standard error of an arm at each rate."""
    means = []
    errors = []
    for rate in rates:
        values = list(found[at_rate(arm, rate)].values())
        means.append(fmean(values))
        errors.append(stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0)
    places = [position + offset for position in range(len(rates))]
    axes.errorbar(places, means, errors, marker="o", capsize=3, label=label)
