"""Remarks on runs that are compared: everything in which they differ besides the chosen options and the seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from uvit_decay.compare.options import by_key
from uvit_decay.compare.runs import Run
from uvit_decay.history import GENERATION, PROBES

SEED = "seed_everything"
ABOUT_ONE_RUN = (SEED, "model.seed", "data.seed", "ckpt_path")  # differ from run to run


def remarks(runs: Sequence[Run], *options: str) -> Iterator[str]:
    """Yield a line for everything in which the runs differ besides the options and the seed."""
    for other in sorted({key for run in runs for key in run.options} - {*options, *ABOUT_ONE_RUN}):
        if not other.startswith("trainer.logger"):
            yield from _differing(other, {run: run.options.get(other, "absent") for run in runs})
    # It does where a run was continued from a checkpoint whose history was not at hand.
    yield from _differing("the step of the first evaluation", {run: int(run.evaluations[0]["step"]) for run in runs})
    yield from _differing("the step of the last evaluation", {run: run.last_step for run in runs})
    if unprobed := [run for run in runs if not run.probed and any(other.probed for other in runs)]:
        yield f"no {PROBES}, so no curves, in {_names(unprobed)}"
    yield from _fid_remarks([run for run in runs if run.generation], [run for run in runs if not run.generation])
    for what, same in by_key(runs, lambda run: _setting(run, options)).items():
        if len(same) > 1:
            yield f"{what} occurs {len(same)} times, so the spread is not that of seeds: {_names(same)}"


def _setting(run: Run, options: Sequence[str]) -> str:
    return ", ".join([f"seed {run.options.get(SEED)}", *(f"{option} {run.options[option]}" for option in options)])


def _fid_remarks(generated: Sequence[Run], others: Sequence[Run]) -> Iterator[str]:
    """Yield remarks on the FID, which runs of denoisers may have; encoders have none."""
    for other in sorted({key for run in generated for key in run.protocol}):
        yield from _differing(f"FID's {other}", {run: run.protocol.get(other, "absent") for run in generated})
    if late := [run for run in generated if run.generation.step != run.last_step]:
        yield f"FID is not of the step of the last evaluation in {_names(late)}"
    if generated and others:
        yield f"no {GENERATION}, so no FID, in {_names(others)}"


def _differing(what: str, values: Mapping[Run, Any]) -> Iterator[str]:
    """Yield one line if not all runs have the same value."""
    words = {run: value if isinstance(value, str) else json.dumps(value, default=str) for run, value in values.items()}
    groups = by_key(values, words.__getitem__)
    if len(groups) > 1:
        yield f"{what} differs: {'; '.join(f'{value} in {_names(runs)}' for value, runs in groups.items())}"


def _names(runs: Sequence[Run], most: int = 3) -> str:
    return ", ".join(str(run.folder) for run in runs) if len(runs) <= most else f"{len(runs)} runs"
