"""Comparison of arms with a baseline arm: runs of one seed are paired.

An arm is a value of an option, or an experiment in several seeds: runs/plain_s0, runs/plain_s1 and runs/plain_seed2 are
the arm `plain` if the numbers are the seeds. A pair has the same seed, and so the same initial weights, batches and
noise where the networks allow it. The spread of differences within pairs is therefore smaller than the spread of the
arms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from uvit_decay.compare.differences import SEED, is_about_one_run
from uvit_decay.compare.report import Groups, Row, Spread, list_runs, list_values
from uvit_decay.compare.runs import FinishedRun, group_runs
from uvit_decay.runs.history import NUMBERED
from uvit_decay.terminal.errors import UserError

ARM = "arm"  # heading of the names of arms
OF_SEED = re.compile(r"(.+)[_-](?:s|seed)?_?(\d+)")


def name_arm(run: FinishedRun) -> str:
    """Return the arm of a run: the name of its experiment, without the run's seed at the end."""
    folder = run.folder.resolve()
    if NUMBERED.fullmatch(folder.name):
        folder = folder.parent
    match = OF_SEED.fullmatch(folder.name)
    if match and int(match[2]) == run.options.get(SEED):
        return match[1]
    return folder.name


def group_by_arms(runs: Sequence[FinishedRun]) -> dict[tuple[str, ...], list[FinishedRun]]:
    """Group runs by their arms, in the order in which these occur."""
    return group_runs(runs, lambda run: (name_arm(run),))


def options_of_arms(groups: Groups) -> list[str]:
    """Return the options that differ between arms but not within any, which define them."""
    names: set[str] = set()
    for runs in groups.values():
        for run in runs:
            names.update(run.options)
    defining = []
    for name in sorted(names):
        if is_about_one_run(name):
            continue
        within = [{repr(run.options.get(name)) for run in runs} for runs in groups.values()]
        if all(len(values) == 1 for values in within) and len(set.union(*within)) > 1:
            defining.append(name)
    return defining


def describe_arms(groups: Groups) -> Iterator[str]:
    """Yield a line for each option that defines the arms: all of them, so that an unwanted difference is seen."""
    for name in options_of_arms(groups):
        values = []
        for (arm,), runs in groups.items():
            values.append(f"{runs[0].options.get(name, 'absent')} in {arm}")
        yield f"{name} differs between the arms: {', '.join(values)}"


def compare_with_baseline(groups: Groups, baseline: str) -> list[Row]:
    """Return a row for each other arm with the differences from the baseline, as mean and spread over pairs.

    Args:
        groups: the label of an arm -> its runs.
        baseline: label of the baseline, one of `groups`.
    """
    if len(groups) == 1:
        raise UserError(f"all runs are {baseline}, there is nothing to compare with it", argument="baseline")
    plain = _group_by_seed(groups[(baseline,)])
    names = list_values(list_runs(groups))
    table = []
    for labels, runs in groups.items():
        if labels == (baseline,):
            continue
        by_seed = _group_by_seed(runs)
        seeds = [seed for seed in by_seed if seed in plain]
        if not seeds:
            seeds_of_both = f"{labels[0]} has the seeds {', '.join(by_seed)}, {baseline} has {', '.join(plain)}"
            raise UserError(f"{seeds_of_both}: pairs need a common seed", argument="baseline")
        differences = {}
        for key in names:
            values = [_mean(by_seed[seed], key) - _mean(plain[seed], key) for seed in seeds]
            differences[key] = Spread.of(values)
        pairs = [run for seed in seeds for run in by_seed[seed]]
        table.append(Row(labels, pairs, differences, len(seeds)))
    return table


def _group_by_seed(runs: Sequence[FinishedRun]) -> Mapping[str, list[FinishedRun]]:
    return group_runs(runs, lambda run: str(run.options.get(SEED)))


def _mean(runs: Sequence[FinishedRun], key: str) -> float:
    """Return the mean of a value over runs of one seed; NaN if one of them does not have it."""
    return fmean(run.last.get(key, math.nan) for run in runs)
