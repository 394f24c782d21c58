"""Training runs, read from the folders that train.py writes: options, history of the probes, last FID."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvit_decay.history import GENERATION, METRICS, PROBES, Measurement, read
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.plain import flat, read_text, read_yaml
from uvit_decay.runtime.program import localised

BEST, ON_TEST, KNN = "best_accuracy", "best_on_test_accuracy", "watched_knn"
RANK, DIMENSIONS = "watched_effective_rank", "watched_dimensions"  # of features centred over samples: dimensions
TOP1 = "val/top1"  # of classifiers
LARGEST = 2**30  # bytes of metrics.csv
OUTCOMES = ("measured_nfe", "remarks")  # metadata of samples that their metrics do not depend on


@dataclass(frozen=True, eq=False)
class Run:
    """A training run.

    Args:
        folder: run folder, as the user named it.
        options: the configuration, flat: `model.net.alpha_min`, `trainer.callbacks.EMA.decay`.
        probes: evaluations of the probes, at least one, in the order of their steps; each has `step`, `epoch`,
            `images` and the values of the history. Unknown values are NaN.
        generation: the last measurement of the samples; None if there is none.
        top1: a classifier's last validation accuracy; None for other networks.
    """

    folder: Path
    options: Mapping[str, Any]
    probes: Sequence[Mapping[str, float]]
    generation: Measurement | None
    top1: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the files that train.py wrote to `folder`; its probes must have been evaluated."""
        options = dict(flat(_configuration(folder)))
        path = folder / PROBES
        probes = [_point(measurement, path) for measurement in read(path)]
        if not probes:
            if (folder / "probes.json").exists():
                raise UserError(f"{folder} is of an earlier version of this project, which wrote no {PROBES}")
            probing = any(name.startswith("trainer.callbacks.LinearProbes") for name in options)
            why = "has not evaluated its probes yet: wait, or set the probes' every_n_steps in its configuration"
            raise UserError(f"{folder} {why if probing else 'logs no probes: add the callback LinearProbes'}")
        generation = read(folder / GENERATION)
        return cls(folder, options, probes, generation[-1] if generation else None, _last_top1(folder / METRICS))

    @property
    def last_step(self) -> int:
        """The step of the last evaluation of the probes."""
        return int(self.probes[-1]["step"])

    @property
    def last(self) -> Mapping[str, float]:
        """The values of the last evaluation of the probes, with `fid`, `is` and `val/top1` as last measured."""
        generated = {} if self.generation is None else self.generation.values
        return {**self.probes[-1], **generated, **({} if self.top1 is None else {TOP1: self.top1})}

    @property
    def protocol(self) -> dict[str, Any]:
        """Everything that FID and IS depend on, flat; empty if they were not measured."""
        metadata = {} if self.generation is None else self.generation.metadata
        return dict(flat({name: value for name, value in metadata.items() if name not in OUTCOMES}))


def _configuration(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not there" if not folder.exists() else f"{folder} is a file, no run folder")
    path = folder / "config.yaml"
    if not path.exists():
        versions = sorted(child.name for child in folder.iterdir() if (child / "config.yaml").exists())
        mend = (
            f"name one of its runs, such as {folder / versions[0]}"
            if versions
            else localised("train.py writes a config.yaml")
        )
        raise UserError(f"{folder} is no run folder: {mend}")
    return read_yaml(path)


def _point(measurement: Measurement, path: Path) -> dict[str, float]:
    """Return a measurement of the probes as a point of the curves."""
    for name, value in measurement.values.items():
        if value < 0:
            raise UserError(f"{path} is damaged: at step {measurement.step}, {name} is {value}")
    at = {"step": measurement.step, "epoch": measurement.epoch, "images": measurement.images_seen}
    return {**dict.fromkeys((BEST, KNN, RANK, DIMENSIONS), math.nan), **measurement.values, **at}


def _last_top1(path: Path) -> float | None:
    """Return the last validation accuracy that was logged to metrics.csv."""
    if not path.exists():
        return None
    whole_lines = read_text(path, LARGEST).rpartition("\n")[0]  # a killed run may have left half a line
    with explained(f"{path} is damaged", ValueError, csv.Error):
        logged = [float(row[TOP1]) for row in csv.DictReader(whole_lines.splitlines()) if row.get(TOP1)]
    return logged[-1] if logged else None
