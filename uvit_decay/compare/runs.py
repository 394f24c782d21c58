"""Training runs, read from the folders that train.py writes: options, histories of probes and of metrics of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from uvit_decay.compare.layers import ChosenProbes, LayerScores
from uvit_decay.files.validation import flat, read_yaml
from uvit_decay.runs.history import (
    CHECKPOINTS,
    CONFIG,
    GENERATION,
    METRICS,
    OF_CLASS_TOKENS,
    PROBES,
    Measurement,
    list_run_folders,
    read,
    read_rows,
)
from uvit_decay.terminal.errors import UserError

PROBE = "probe_accuracy"  # of the chosen layers
BEST = "best_accuracy"
ON_TEST = "best_on_test_accuracy"
KNN = "tracked_knn"
ENTROPY = "tracked_spectrum_entropy"
EFFECTIVE_RANK = "tracked_effective_rank_exp"
MEAN_SHARE = "tracked_mean_share"
NOISE_SHARE = "tracked_noise_share"
OF_LAYERS = {  # scores of layers, by the names under which they are compared
    PROBE: "test_accuracy",
    KNN: "knn_accuracy",
    ENTROPY: "spectrum_entropy",
    EFFECTIVE_RANK: "effective_rank_exp",
    MEAN_SHARE: "mean_share",
    NOISE_SHARE: "noise_share",
}
TOKENS = {"mean": "mean patch tokens", "all": "mean tokens", "cls": "class tokens"}  # by the pool of probes
VALIDATION = "val/"  # prefix of the values of validations in metrics.csv
TOP1 = "val/top1"  # of classifiers
Key = TypeVar("Key")
OUTCOMES = ("measured_nfe", "remarks", "ceiling")  # metadata of samples that their metrics do not depend on


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A training run.

    Args:
        folder: run folder, as the user named it.
        options: the configuration, flat: `model.net.alpha_min`, `trainer.callbacks.EMA.decay`.
        ranked: name of the tokens whose rank its probes measured; None without probes.
        evaluations: the evaluations of the probes or, without probes, of the samples; at least one, in the order of
            their steps. Each has `step`, `epoch`, `images` and the values of the history; unknown values are NaN.
        generation: the last metrics of samples; None if there are none.
        validation: the last values of its validations, such as val/loss and a classifier's val/top1, in [0, 1].
        layers: scores of the last probes by layer, under the names of OF_LAYERS; None unless they were asked for. Then
            `evaluations` is their mean over the layers alone.
    """

    folder: Path
    options: Mapping[str, Any]
    ranked: str | None
    evaluations: Sequence[Mapping[str, float]]
    generation: Measurement | None
    validation: Mapping[str, float] = field(default_factory=dict)
    layers: LayerScores | None = None

    @classmethod
    def read(cls, folder: Path, chosen: ChosenProbes | None = None) -> FinishedRun:
        """Read the files that train.py wrote to `folder`; in the folder of an experiment, its newest training.

        Args:
            folder: folder of a run or an experiment.
            chosen: the layers and noise levels whose last probes are read; None reads the histories.
        """
        versions = list_run_folders(folder)
        if versions:
            trained = [version for version in versions if (version / CHECKPOINTS).exists()]  # a validation has none
            folder = (trained or versions)[0]
        config = folder / CONFIG
        if not config.exists():
            raise UserError(f"{folder} has no config.yaml: name a run folder, such as runs/digits/version_0")
        options = dict(flat(read_yaml(config)))
        generation = read(folder / GENERATION)
        last = generation[-1] if generation else None
        validation = _read_validation(folder / METRICS)
        if chosen is not None:
            layers, tokens = _read_layers(folder, chosen)
            point = {BEST: math.nan, **layers.average(), "step": layers.step, "epoch": math.nan, "images": math.nan}
            return cls(folder, options, tokens, [point], last, validation, layers)
        probes = read(folder / PROBES)
        if not (probes or generation):
            raise UserError(f"{folder} has no measurement in {PROBES} or {GENERATION}: leave it out, or wait for one")
        ranked = None
        if probes:
            ranked = _name_tokens(probes[-1].metadata, probes[-1].values)
        points = list(map(_make_point, probes or generation))
        return cls(folder, options, ranked, points, last, validation)

    @property
    def probed(self) -> bool:
        """True if the run has evaluations of probes."""
        return self.ranked is not None

    @property
    def last_step(self) -> int:
        """The step of the last evaluation."""
        return int(self.evaluations[-1]["step"])

    @property
    def last(self) -> Mapping[str, float]:
        """The values of the last evaluation, with the metrics of samples and the validation as last measured."""
        values = {**self.evaluations[-1], **self.validation}
        if self.generation is not None:
            values |= self.generation.values
        return values

    def has_part(self, option: str) -> bool:
        """Return whether the run has the object that an option belongs to, so that an absent option has its default."""
        part = option.rpartition(".")[0]
        if not part:
            return bool(self.options)
        return any(name.startswith(f"{part}.") for name in self.options)

    @property
    def protocol(self) -> dict[str, Any]:
        """The settings that the metrics of samples depend on, flat; empty if there are no such metrics."""
        if self.generation is None:
            return {}
        settings = dict(self.generation.metadata)
        for name in OUTCOMES:
            settings.pop(name, None)
        return dict(flat(settings))


def _name_tokens(protocol: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the name of the tokens whose rank the probes measured, given their settings and the names of scores."""
    pool = str(protocol.get("pool", "mean"))
    for name in names:
        if name.endswith(OF_CLASS_TOKENS):
            pool = "cls"
    return TOKENS.get(pool, pool)


def _read_layers(folder: Path, chosen: ChosenProbes) -> tuple[LayerScores, str]:
    """Return the scores of the chosen layers under the names of OF_LAYERS, and the tokens whose rank was measured.

    A score that is missing is NaN.
    """
    layers = chosen.read(folder)
    by_layer = {}
    names: set[str] = set()
    for number, scores in layers.by_layer.items():
        names.update(scores)
        known = {name.removesuffix(OF_CLASS_TOKENS): value for name, value in scores.items()}
        by_layer[number] = {name: known.get(score, math.nan) for name, score in OF_LAYERS.items()}
    return replace(layers, by_layer=by_layer), _name_tokens(layers.protocol, names)


def _make_point(measurement: Measurement) -> dict[str, float]:
    """Return a measurement as a point of the curves."""
    point = dict.fromkeys((BEST, KNN, ENTROPY, EFFECTIVE_RANK, MEAN_SHARE, NOISE_SHARE), math.nan)
    for name, value in measurement.values.items():
        point[name.removesuffix(OF_CLASS_TOKENS)] = value
    point["step"] = measurement.step
    point["epoch"] = measurement.epoch
    point["images"] = measurement.images_seen
    return point


def _read_validation(path: Path) -> dict[str, float]:
    """Return the last value of everything that validations logged to metrics.csv; empty if there is nothing."""
    last = {}
    for _, values in read_rows(path):
        for name, value in values.items():
            if name.startswith(VALIDATION):
                last[name] = float(value)
    return last


def find_option(runs: Sequence[FinishedRun], name: str, argument: str = "by") -> str:
    """Return the full name of an option, given by its last part or parts; errors name the `argument` that gave it."""
    ending = name.replace(".init_args", "")
    names: set[str] = set()
    for run in runs:
        names.update(run.options)
    found = [ending]
    if ending not in names:
        found = sorted(option for option in names if option.endswith(f".{ending}"))
    if not found:
        raise UserError(f"the configurations have no option {name}; model.net.alpha_min is one", argument=argument)
    if len(found) > 1:
        raise UserError(f"{name} may be {', '.join(found)}: name one of them", argument=argument)
    for run in runs:
        if found[0] not in run.options:
            raise UserError(f"the configuration of {run.folder} has no {found[0]}", argument=argument)
    return found[0]


def group_by_options(runs: Sequence[FinishedRun], options: Sequence[str]) -> dict[tuple[str, ...], list[FinishedRun]]:
    """Group runs by the values of options, in order: numbers before words.

    Values of the first option descend, because the paper's tables begin with the plain network; others ascend.
    """

    def sort_key(run: FinishedRun) -> list[tuple[bool, float, str]]:
        keys = []
        for number, option in enumerate(options):
            keys.append(_place(run.options[option], descending=number == 0))
        return keys

    def labels(run: FinishedRun) -> tuple[str, ...]:
        return tuple(str(run.options[option]) for option in options)

    return group_runs(sorted(runs, key=sort_key), labels)


def _place(value: Any, descending: bool) -> tuple[bool, float | int, str]:
    """Return the sort key of a value: numbers by size, then words by letters."""
    if not is_number(value):
        return True, 0, str(value)
    if descending:
        return False, -value, ""
    return False, value, ""


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float; bool does not count."""
    return type(value) in (int, float)


def group_runs(runs: Iterable[FinishedRun], key: Callable[[FinishedRun], Key]) -> dict[Key, list[FinishedRun]]:
    """Group runs by a key; the keys are in the order of their first occurrence."""
    groups: dict[Key, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
