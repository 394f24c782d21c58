"""Training runs, read from the folders that train.py writes: options, scores of the probes, last FID."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvit_decay.runtime.errors import UserError, one_line
from uvit_decay.runtime.plain import flat, read_json, read_text, read_yaml, typed

BEST, ON_TEST = "probe/best_accuracy", "probe/best_on_test_accuracy"
WATCHED, KNN, RANK = "probe/watched_accuracy", "probe/watched_knn", "probe/watched_effective_rank"
KEYS = (BEST, ON_TEST, WATCHED, KNN, RANK)  # columns of metrics.csv, filled at each look (evaluation) of LinearProbes
SEED = "seed_everything"
PROTOCOL = ("n", "samples", "reference", "extractor", "is_splits")  # entries of generation.json beside the values
GENERATION = {"step": int, "fid": float | None, "is": float | None, "n": int, "samples": dict[str, object]}
GENERATION |= {"reference": dict[str, object], "extractor": str, "is_splits": int}
VAGUE = 0.1  # relative width of the range for steps per epoch above which the number counts as unknown


@dataclass(frozen=True, eq=False)
class Run:
    """A training run.

    Args:
        folder: run folder, as the user named it.
        options: the configuration, flat: `model.net.alpha_min`, `trainer.callbacks.EMA.decay`.
        looks: evaluations of the probes, at least one, in the order of their steps; each has `step`, `epoch`, `images`
            and KEYS. Unknown values are NaN.
        generation: the last entry of generation.json; empty if there is none.
    """

    folder: Path
    options: Mapping[str, Any]
    looks: Sequence[Mapping[str, float]]
    generation: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the files that train.py wrote to `folder`.

        Raises:
            UserError: it is no run folder, its files cannot be read, or its probes have not been evaluated yet.
        """
        options = dict(flat(_configuration(folder)))
        rows = _rows(folder / "metrics.csv")
        try:
            looks = _looks(rows, _batch_size(folder, options))
        except (ValueError, ArithmeticError) as error:
            raise UserError(f"{folder / 'metrics.csv'} is damaged: {one_line(error)}") from error
        if not looks:
            probing = any(name.startswith("trainer.callbacks.LinearProbes") for name in options)
            why = "has not looked at its probes yet: wait, or set the probes' every_n_steps in its configuration"
            raise UserError(f"{folder} {why if probing else 'logs no probes: add the callback LinearProbes'}")
        return cls(folder, options, looks, _generation(folder / "generation.json"))

    @property
    def last(self) -> Mapping[str, float]:
        """The values of the last look, with `fid` and `is` as last measured."""
        generated = {name: self.generation.get(name) for name in ("fid", "is")}
        known = {name: math.nan if value is None else float(value) for name, value in generated.items()}
        return {**self.looks[-1], **known}

    @property
    def protocol(self) -> dict[str, Any]:
        """Everything that FID and IS depend on, flat."""
        return dict(flat({name: self.generation[name] for name in PROTOCOL if name in self.generation}))


def _configuration(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not there" if not folder.exists() else f"{folder} is a file, no run folder")
    path = folder / "config.yaml"
    if not path.exists():
        versions = sorted(child.name for child in folder.iterdir() if (child / "config.yaml").exists())
        mend = f"name one of its runs, such as {folder / versions[0]}" if versions else "train.py writes a config.yaml"
        raise UserError(f"{folder} is no run folder: {mend}")
    return read_yaml(path)


def _rows(path: Path) -> list[dict[str, str]]:
    """Return all complete rows of a CSV file, none if it is missing; a run in progress may have written half a line."""
    if not path.exists():
        return []
    text = read_text(path, 2**30)
    try:
        return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines(), restval=""))
    except csv.Error as error:
        raise UserError(f"{path} is damaged: {one_line(error)}") from error


def _batch_size(folder: Path, options: Mapping[str, Any]) -> float:
    """Return the number of images per step; NaN if the configuration does not set it."""
    names = ("data.batch_size", "trainer.accumulate_grad_batches")
    size, pieces = (typed(int | None, options.get(name), f"{folder / 'config.yaml'}: {name}") for name in names)
    return float(size or math.nan) * (pieces or 1)


def _looks(rows: Sequence[Mapping[str, str]], batch_size: float) -> list[dict[str, float]]:
    """Return the looks in `rows` of metrics.csv, which has a row for each call of the logger, each with empty cells.

    Raises:
        ValueError, ArithmeticError: a value is no number, or out of range for a step, an accuracy or a rank.
    """
    probed = [row for row in rows if row.get(BEST)]
    epoch = steps_in_epoch(rows) if probed else math.nan
    found = {}
    for row in probed:
        step = float(int(row.get("step", "")))
        values = {key: float(row.get(key) or math.nan) for key in KEYS}
        for key, value in {"step": step, **values}.items():
            if value < 0 or math.isinf(value):
                raise ValueError(f"{key} {value}")
        found[step] = {"step": step, "epoch": step / epoch, "images": step * batch_size, **values}
    return [found[step] for step in sorted(found)]


def steps_in_epoch(rows: Sequence[Mapping[str, str]]) -> float:
    """Infer the number N of steps per epoch; NaN if the log does not determine it, as before the second epoch.

    No file of a run records it, but Lightning logs, with every training loss, the index s of the step and that of its
    epoch, e = floor(s / N): so s / (e + 1) < N <= s / e.
    """
    # Intersect the bounds of all rows. N is an integer: the lower one means N >= floor(s / (e + 1)) + 1.
    least, most = 1, math.inf
    for row in rows:
        if row.get("train/loss") and row.get("epoch"):
            step, epoch = int(row.get("step", "")), int(row["epoch"])
            least = max(least, step // (epoch + 1) + 1)
            most = min(most, step // epoch if epoch else math.inf)
    # Take the middle of a narrow range. A reversed one (a damaged log) or a wide one is no answer.
    return (least + most) / 2 if 0 <= most - least <= VAGUE * least else math.nan


def _generation(path: Path) -> dict[str, Any]:
    """Return the newest entry, empty if there is no file; raise a UserError for a damaged one."""
    if not path.exists():
        return {}
    entries = read_json(path, list[dict[str, object]])
    if not entries:
        raise UserError(f"{path} has no entry")
    for name, kind in GENERATION.items():
        if name in entries[-1]:
            typed(kind, entries[-1][name], f"{path}: {name}")
    return entries[-1]
