"""Remarks on a comparison of runs: differences besides the options that are compared, and doubtful runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from uvit_decay.compare.runs import MEAN_SHARE, FinishedRun, group_runs
from uvit_decay.runs.history import GENERATION, PROBES

SEED = "seed_everything"
COLLAPSED = 0.95  # share of the mean
ABOUT_ONE_RUN = (SEED, "model.seed", "data.seed", "ckpt_path")  # differ from run to run
LOGGERS = "trainer.logger"  # the options that begin so do, too


def remarks(runs: Sequence[FinishedRun], *options: str) -> Iterator[str]:
    """Yield a line for each difference between the runs besides the options and the seed, and for each doubtful run."""
    yield from _compare_settings(runs, options)
    yield from _remark_evaluations(runs)
    yield from _remark_layers(runs)
    yield from _remark_generation(runs)
    yield from _find_duplicates(runs, options)


def is_about_one_run(name: str) -> bool:
    """Return whether an option, such as the seed, differs from run to run and is no setting that is compared."""
    return name in ABOUT_ONE_RUN or name.startswith(LOGGERS)


def _compare_settings(runs: Sequence[FinishedRun], options: Sequence[str]) -> Iterator[str]:
    """Yield a line for each other option whose value differs between the runs."""
    names: set[str] = set()
    for run in runs:
        names.update(run.options)
    for name in sorted(names.difference(options)):
        if is_about_one_run(name):
            continue
        values = {}
        for run in runs:
            if name in run.options or not run.has_part(name):
                values[run] = run.options.get(name, "absent")
        yield from _compare_values(name, values)


def _remark_evaluations(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Yield a line for each difference between the evaluations of the runs, and for collapsed features."""
    pools = {}
    final_steps = {}
    unprobed = []
    collapsed = []
    for run in runs:
        if run.probed:
            pools[run] = run.ranked
        else:
            unprobed.append(run)
        if run.last.get(MEAN_SHARE, 0.0) > COLLAPSED:
            collapsed.append(run)
        final_steps[run] = run.last_step
    yield from _compare_values("the pool of the rank", pools)
    yield from _compare_values("the step of the last evaluation", final_steps)
    if pools and unprobed:
        yield f"no {PROBES}, so no curves, in {_names(unprobed)}"
    if collapsed:
        what = f"of the tracked features more than {COLLAPSED} is their mean, which all images share"
        yield f"{what}: {_names(collapsed)}"


def _remark_layers(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Yield a line for each difference between the settings and layers of probes that are read layer by layer."""
    probed = {run: run.layers for run in runs if run.layers is not None}
    names = {name for layers in probed.values() for name in layers.protocol}
    for name in sorted(names):
        yield from _compare_values(
            f"the probes' {name}", {run: layers.protocol.get(name, "absent") for run, layers in probed.items()}
        )
    numbers = {run: ", ".join(map(str, layers.by_layer)) for run, layers in probed.items()}
    yield from _compare_values("the probed layers", numbers)


def _remark_generation(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Yield a line for each difference between the protocols and steps of the runs' metrics of samples."""
    protocols: dict[FinishedRun, dict[str, Any]] = {}
    names: set[str] = set()
    early = []
    others = []
    for run in runs:
        if run.generation is None:
            others.append(run)
            continue
        protocol = run.protocol
        protocols[run] = protocol
        names.update(protocol)
        if run.generation.step != run.last_step:
            early.append(run)
    for name in sorted(names):
        values = {}
        for run, protocol in protocols.items():
            values[run] = protocol.get(name, "absent")
        yield from _compare_values(f"the metrics' {name}", values)
    if early:
        yield f"metrics of samples are not of the step of the last evaluation in {_names(early)}"
    if protocols and others:
        yield f"no {GENERATION}, so no metrics of samples, in {_names(others)}"


def _find_duplicates(runs: Sequence[FinishedRun], options: Sequence[str]) -> Iterator[str]:
    """Yield a line for each combination of seed and options that more than one run has."""
    named = {"seed": SEED}
    for option in options:
        named[option] = option

    def describe(run: FinishedRun) -> str:
        values = []
        for word, name in named.items():
            values.append(f"{word} {run.options.get(name)}")
        return ", ".join(values)

    for what, same in group_runs(runs, describe).items():
        if len(same) > 1:
            yield f"{what} occurs {len(same)} times, so the spread is not the spread over seeds: {_names(same)}"


def _compare_values(what: str, values: Mapping[FinishedRun, Any]) -> Iterator[str]:
    """Yield one line if the runs have different values."""
    words = {}
    for run, value in values.items():
        words[run] = value if isinstance(value, str) else json.dumps(value, default=str)
    groups = group_runs(values, words.__getitem__)
    if len(groups) < 2:
        return
    different = []
    for value, runs in groups.items():
        different.append(f"{value} in {_names(runs)}")
    yield f"{what} differs: {'; '.join(different)}"


def _names(runs: Sequence[FinishedRun]) -> str:
    """Return the folders of at most three runs, or the number of runs."""
    if len(runs) > 3:
        return f"{len(runs)} runs"
    folders = [str(run.folder) for run in runs]
    return ", ".join(folders)
