"""Measured numbers of one set of weights: from the histories of their run, and from reports of evaluate.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvit_decay.checkpoint import Checkpoint
from uvit_decay.checkpoint.newest import run_of
from uvit_decay.evaluation.metric_table import displayed
from uvit_decay.history import GENERATION, PROBES, read
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.plain import flat, read_json, typed

BEST_ON_TEST = "best_on_test_accuracy"  # biased; shown only where the protocol chooses the cell by it
PROBED = {  # values of the best cell of the probes: title and decimals
    "test_accuracy": ("Accuracy of the linear probe", 4),
    BEST_ON_TEST: ("Accuracy of the linear probe, of the cell that is best on the test images", 4),
    "knn_accuracy": ("Accuracy of the nearest neighbours", 4),
    "cknna": ("CKNNA", 4),
    "effective_rank": ("Effective rank", 4),
}
SPREAD = "_std"
HIDDEN = ("name", "checkpoint")  # a name that is made of the other settings; a path
CONFIGURATION = "config.yaml"  # of a run


@dataclass(frozen=True)
class Number:
    """A measured value: its name in reports, its title, and its text with the spread."""

    name: str
    title: str
    value: float
    text: str


@dataclass(frozen=True)
class Evaluation:
    """Numbers that were measured together.

    Args:
        task: generation or probe.
        data: name of what the samples were compared with, or whose images were classified.
        numbers: the values.
        protocol: everything that they depend on, flat.
        remarks: caveats for readers, one sentence each.
    """

    task: str
    data: str
    numbers: Sequence[Number]
    protocol: Mapping[str, Any]
    remarks: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The protocol in one line, the complete name of the numbers."""
        return ", ".join(f"{name} {value}" for name, value in self.protocol.items())


def recorded_run(file: Path) -> Path | None:
    """Return the folder of the run that wrote the checkpoint `file` and its configuration; None if it is in none."""
    run = run_of(file.absolute())
    return run if run is not None and (run / CONFIGURATION).is_file() else None


def of_run(run: Path, checkpoint: Checkpoint) -> list[Evaluation]:
    """Return what the run has measured with the weights of its `checkpoint`, at the same step."""
    found = []
    for history, place in ((GENERATION, "samples"), (PROBES, None)):
        for measurement in read(run / history):
            where, metadata = f"{run / history}, step {measurement.step}", {"step": measurement.step}
            metadata |= measurement.metadata
            about = metadata if place is None else metadata.get(place)
            same = isinstance(about, dict) and about.get("weights") == str(checkpoint.weights)
            if not same or measurement.step != checkpoint.step:
                continue
            found.append(_generation(measurement.values, metadata, where) if place else _probe(metadata, where))
    return found


def of_report(file: Path, checkpoint: Checkpoint) -> Evaluation:
    """Return the numbers in a report of evaluate.py generation or probe; raise a UserError if they are of others."""
    content = read_json(file, dict[str, object])
    protocol = typed(dict[str, object], content.get("protocol"), f"{file}: protocol")
    generated = "values" in content
    if not generated and "best" not in content:
        raise UserError(f"--metrics {file}: it is no report of evaluate.py generation or probe")
    about = typed(dict[str, object], protocol.get("samples"), f"{file}: samples") if generated else protocol
    if not {"weights", "step"} <= about.keys():
        raise UserError(f"--metrics {file}: it does not say of which weights it is: evaluate a --ckpt")
    theirs, ours = (about["step"], about["weights"]), (checkpoint.step, str(checkpoint.weights))
    if theirs != ours:
        raise UserError(f"--metrics {file}: it is of {theirs[1]} weights of step {theirs[0]}, not {ours[1]}, {ours[0]}")
    if generated:
        return _generation(content["values"], {**protocol, "remarks": content.get("remarks", [])}, str(file))
    return _probe({**protocol, "best": content["best"]}, str(file))


def _generation(values: Any, metadata: Mapping[str, Any], where: str) -> Evaluation:
    values = typed(dict[str, object], values, f"{where}: values")
    reference = typed(dict[str, object], metadata.get("reference"), f"{where}: reference")
    remarks = typed(tuple[str, ...], metadata.get("remarks", []), f"{where}: remarks")
    samples = typed(dict[str, object], metadata.get("samples"), f"{where}: samples")
    protocol = {name: value for name, value in metadata.items() if name not in ("remarks", "samples")} | samples
    data = str(reference.get("name") or reference.get("statistics") or "reference")
    shown = {name: (entry.title, entry.decimals) for name, entry in displayed().items()}
    return Evaluation("generation", data, tuple(_numbers(values, shown)), public(protocol), remarks)


def _probe(metadata: Mapping[str, Any], where: str) -> Evaluation:
    best = typed(dict[str, object], metadata.get("best"), f"{where}: best")
    cell = {name: best[name] for name in ("layer", "kind", "t") if name in best}
    protocol = {"features after": best.get("name"), **cell}
    protocol |= {name: value for name, value in metadata.items() if name not in ("best", "watched")}
    hidden = BEST_ON_TEST if "test_accuracy" in best else ""
    values = {name: best[name] for name in best if name.removesuffix(SPREAD) in PROBED.keys() - {hidden}}
    numbers = _numbers(values, PROBED)
    return Evaluation("probe", str(metadata.get("data", "")), tuple(numbers), public(protocol))


def _numbers(values: Mapping[str, Any], shown: Mapping[str, tuple[str, int]]) -> Iterator[Number]:
    """Yield the finite values; their spreads are part of their texts."""
    finite = {name: value for name, value in values.items() if isinstance(value, float) and math.isfinite(value)}
    for name, value in finite.items():
        if name.removesuffix(SPREAD) in finite and name.endswith(SPREAD):
            continue
        title, decimals = shown.get(name, (name.replace("_", " "), 3))
        spread = f" ± {finite[name + SPREAD]:.{decimals}f}" if name + SPREAD in finite else ""
        yield Number(name, title, value, f"{value:.{decimals}f}{spread}")


def public(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested plain values as a flat dict for readers elsewhere: without empty ones, of paths the last part."""
    shown = {}
    for name, value in flat(dict(values)):
        if name in HIDDEN or value in (None, "", [], {}):
            continue
        shown[name] = Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
    return shown
