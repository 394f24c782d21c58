"""Tables of the arms of a study: probe accuracies, noise shares and samples, a row for each arm and seed.

target.sh adds the rows of a finished arm; target.py and confirm.py read them.
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch

from benchmarks.table import find_processor
from uvit_decay.runs import history

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


def summarise(values: BySeed, decimals: int = 1) -> str:
    """Return `mean +- standard error (number of seeds)`, signed; `-` without a seed."""
    if not values:
        return "-"
    mean = fmean(values.values())
    if len(values) == 1:
        return f"{mean:+.{decimals}f} (1 seed)"
    error = stdev(values.values()) / math.sqrt(len(values))
    return f"{mean:+.{decimals}f} +- {error:.{decimals}f} ({len(values)} seeds)"


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


def add_rows(tables: Path, run: Path, arm: str, seed: int, steps: int) -> None:
    """Add the rows of a finished arm to the three tables: the accuracies last, because they say that it is finished."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    cpu = f"{find_processor()} ({torch.backends.cpu.get_cpu_capability()})"  # one name may stand for several models
    about = [arm, seed, steps, commit.stdout.strip(), cpu]
    loss = f"{mean_loss(run, steps):.5f}"
    report = json.loads((run / f"samples_{steps}.json").read_text())
    append(tables, SAMPLES, [[*about, *(f"{report['values'][name]:.4f}" for name in SAMPLE_VALUES)]])
    probes = run / f"probes_{steps}"
    noise = probes / "noise_share.csv"
    if not noise.exists():  # probes of before version 0.2.0 was released have it among their scores
        noise = probes / "probes.csv"
    measured = (
        (NOISE_SHARE, noise, "noise_share", []),
        (ACCURACY, probes / "probes.csv", "test_accuracy", [loss]),
    )
    for table, path, score, further in measured:
        rows = []
        for time, values in read_scores(path, score).items():
            rows.append([*about, *further, time, *(f"{value:.4f}" for value in values)])
        append(tables, table, rows)


def read_scores(probes: Path, score: str) -> dict[str, list[float]]:
    """Return a score of a probe's table by noise level, in the order of the layers."""
    found: dict[str, list[float]] = {}
    with probes.open() as file:
        for row in csv.DictReader(file):
            found.setdefault(f"{float(row['t']):g}", []).append(float(row[score]))
    return found


def mean_loss(run: Path, steps: int) -> float:
    """Return the mean training loss of the last 300 of these steps, over all parts of a resumed run."""
    found = {}
    for log in run.parent.glob("version_*/metrics.csv"):
        for step, row in history.read_rows(log):
            if "train/loss" in row:
                found[step] = float(row["train/loss"])
    return fmean(value for step, value in found.items() if steps - 300 <= step < steps)


def append(tables: Path, table: str, rows: Sequence[Sequence[object]]) -> None:
    """Add rows to a table, and its header to a new one."""
    path = tables / table
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(HEADERS[table])
        writer.writerows(rows)
