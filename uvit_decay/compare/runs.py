"""Training runs, read from the folders that train.py writes: options, histories of the probes and of the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from uvit_decay.history import GENERATION, METRICS, PROBES, Measurement, read, read_rows
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.validation import flat, read_yaml

BEST, ON_TEST, KNN = "best_accuracy", "best_on_test_accuracy", "tracked_knn"
RANK, DIMENSIONS = "tracked_effective_rank", "tracked_dimensions"  # of features centred over samples: dimensions
MEAN_SHARE = "tracked_mean_share"
OF_CLASS_TOKENS = "_of_cls"  # the ending of ranks of class tokens; others are of pooled features
TOKENS = {"mean": "mean patch tokens", "all": "mean tokens", "cls": "class tokens"}  # by the pool of probes
TOP1 = "val/top1"  # of classifiers
MOST = 1e12  # beyond every measured value
Key = TypeVar("Key")
OUTCOMES = ("measured_nfe", "remarks")  # metadata of samples that their metrics do not depend on


@dataclass(frozen=True, eq=False)
class Run:
    """A training run.

    Args:
        folder: run folder, as the user named it.
        options: the configuration, flat: `model.net.alpha_min`, `trainer.callbacks.EMA.decay`.
        ranked: the tokens whose rank its probes measured; None without probes.
        evaluations: those of the probes, or else of the samples, at least one, in the order of their steps; each has
            `step`, `epoch`, `images` and the values of the history. Unknown values are NaN.
        generation: the last measurement of the samples; None if there is none.
        top1: a classifier's last validation accuracy; None for other networks.
    """

    folder: Path
    options: Mapping[str, Any]
    ranked: str | None
    evaluations: Sequence[Mapping[str, float]]
    generation: Measurement | None
    top1: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the files that train.py wrote to `folder`; its probes or its samples must have been evaluated."""
        config = folder / "config.yaml"
        if not config.exists():
            raise UserError(f"{folder} has no config.yaml: name a run folder, such as runs/digits/version_0")
        options = dict(flat(read_yaml(config)))
        probes, generation = _history(folder / PROBES), _history(folder / GENERATION)
        if not (probes or generation):
            mend = "leave it out, wait for its first evaluation, or add the callback LinearProbes or GenerationMetrics"
            raise UserError(f"{folder} has no measurement in {PROBES} or {GENERATION}: {mend}")
        last = generation[-1] if generation else None
        points = [_point(measurement) for measurement in probes or generation]
        return cls(folder, options, _ranked(probes[-1]) if probes else None, points, last, _last_top1(folder / METRICS))

    @property
    def probed(self) -> bool:
        """Return whether the evaluations are those of probes."""
        return self.ranked is not None

    @property
    def last_step(self) -> int:
        """The step of the last evaluation."""
        return int(self.evaluations[-1]["step"])

    @property
    def last(self) -> Mapping[str, float]:
        """The values of the last evaluation, with the metrics of samples and `val/top1` as last measured."""
        generated = {} if self.generation is None else self.generation.values
        return {**self.evaluations[-1], **generated, **({} if self.top1 is None else {TOP1: self.top1})}

    def has_part(self, option: str) -> bool:
        """Return whether the run has the object that an option is of: its default holds where the option is absent."""
        of = option.rpartition(".")[0]
        return any(name.startswith(f"{of}.") or not of for name in self.options)

    @property
    def protocol(self) -> dict[str, Any]:
        """Everything that the metrics of samples depend on, flat; empty if there are none."""
        metadata = {} if self.generation is None else self.generation.metadata
        return dict(flat({name: value for name, value in metadata.items() if name not in OUTCOMES}))


def _history(path: Path) -> list[Measurement]:
    """Read a history; raise a UserError for a value that no evaluation has, which would spoil means and axes."""
    measurements = read(path)
    for measurement in measurements:
        for name, value in measurement.values.items():
            if abs(value) > MOST:
                raise UserError(f"{path} is damaged: at step {measurement.step}, {name} is {value:g}")
    return measurements


def _ranked(measurement: Measurement) -> str:
    """Return the tokens whose rank probes measured."""
    of_class_tokens = any(name.endswith(OF_CLASS_TOKENS) for name in measurement.values)
    pool = "cls" if of_class_tokens else str(measurement.metadata.get("pool", "mean"))
    return TOKENS.get(pool, pool)


def _point(measurement: Measurement) -> dict[str, float]:
    """Return a measurement as a point of the curves."""
    at = {"step": measurement.step, "epoch": measurement.epoch, "images": measurement.images_seen}
    values = {name.removesuffix(OF_CLASS_TOKENS): value for name, value in measurement.values.items()}
    return {**dict.fromkeys((BEST, KNN, RANK, DIMENSIONS, MEAN_SHARE), math.nan), **values, **at}


def _last_top1(path: Path) -> float | None:
    """Return the last validation accuracy that was logged to metrics.csv."""
    with explained(f"{path} is damaged", ValueError):
        logged = [float(values[TOP1]) for _, values in read_rows(path) if TOP1 in values]
    if logged and not 0 <= logged[-1] <= 1:
        raise UserError(f"{path} is damaged: {TOP1} is {logged[-1]:g}")
    return logged[-1] if logged else None


def find_option(runs: Sequence[Run], name: str, flag: str = "--by") -> str:
    """Return the full name of an option, given by its last part or parts; all runs must have it."""
    ending = name.replace(".init_args", "")
    names = {name for run in runs for name in run.options}
    found = sorted({ending} & names or {name for name in names if name.endswith(f".{ending}")})
    if not found:
        raise UserError(f"{flag} {name}: the configurations have no such option; model.net.alpha_min is one")
    if len(found) > 1:
        raise UserError(f"{flag} {name} may be {', '.join(found)}: name one of them")
    for run in runs:
        if found[0] not in run.options:
            raise UserError(f"{flag} {name}: the configuration of {run.folder} has no {found[0]}")
    return found[0]


def grouped_by(runs: Sequence[Run], options: Sequence[str]) -> dict[tuple[str, ...], list[Run]]:
    """Group runs by the values of options.

    Those of the first one descend, as the paper's tables begin with the plain network, others ascend; words come last.
    """
    ordered = list(runs)
    for i, option in reversed(list(enumerate(options))):
        ordered.sort(key=lambda run, option=option, i=i: _place(run.options[option], descending=i == 0))
    return by_key(ordered, lambda run: tuple(str(run.options[option]) for option in options))


def _place(value: Any, descending: bool) -> tuple[bool, float | int, str]:
    if not is_number(value):
        return True, 0, str(value)
    return False, -value if descending else value, ""


def is_number(value: object) -> bool:
    """Return whether an option is a number, and not true or false."""
    return type(value) in (int, float)


def by_key(runs: Iterable[Run], key: Callable[[Run], Key]) -> dict[Key, list[Run]]:
    """Group runs by a key, in the order of their first occurrence."""
    groups: dict[Key, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
