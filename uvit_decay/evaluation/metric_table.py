"""Table of the metrics of generated images: a metric is one entry of METRICS.

Commands, reports and the comparison of runs read the table; docs/extending.md shows how to add an entry. Metrics are
imported by the functions that compute them, so that --help needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from uvit_decay.terminal.command_line import Advanced
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, check_types

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from uvit_decay.encoders.extractors import Extractor
    from uvit_decay.evaluation.feature_store import FeatureStore
    from uvit_decay.evaluation.statistics_file import Reference

SPLITS = 10  # parts of the Inception Score
NEIGHBOURS = 3  # k of precision and recall
PROJECTIONS = 1024  # directions of MIND
# Names of the Fréchet and the kernel distance for features of some families of extractors; otherwise fd and kid.
FRECHET_NAMES = {"inception": "fid", "dinov2": "fdd"}
KERNEL_NAMES = {"dinov2": "kdd"}


class Value(NamedTuple):
    """Display of a value: title, number of decimals, better direction, and an explanatory phrase."""

    title: str
    decimals: int
    better: Literal["lower", "higher"]
    meaning: str


class Inputs(NamedTuple):
    """Inputs of a metric; `device` can compute in float64."""

    samples: FeatureStore
    reference: Reference
    options: MetricOptions
    device: torch.device
    extractor: Extractor

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return the features of all reference images and of all samples, float32 (n, d) and (m, d), on the device."""
        real = self.reference.tensor("features").to(self.device)
        fake = self.samples.tensor("features").to(self.device)
        return real, fake


@dataclass(frozen=True)
class Metric:
    """A metric.

    Args:
        values: display of all values that it may have, by name. A value `x_std` is the spread of `x` and is not listed
            here.
        compute: function that returns the values by name.
        needs: the extractor's output from which it is computed, "features", "logits" or "spatial".
        compares_with: the part of the reference that it needs: nothing, mean and covariance, or the single images.
        least: function (options, width of the output) -> least number of images on either side.
        advice: remedy for fewer images; `{n}` stands for their number.
        settings: function of the options that returns those on which the values depend, by name, for reports.
        names: names for features of some families of extractors; for others it has the name of its entry.
        by_default: whether it is computed unless the user names metrics.
    """

    values: dict[str, Value]
    compute: Callable[[Inputs], dict[str, float]]
    needs: Literal["features", "logits", "spatial"] = "features"
    compares_with: Literal["nothing", "statistics", "images"] = "statistics"
    least: Callable[[MetricOptions, int], int] = lambda options, width: 2
    advice: str = "take more"
    settings: Callable[[MetricOptions], dict[str, Any]] = lambda options: {}
    names: Mapping[str, str] = field(default_factory=dict)
    by_default: bool = True


def _inception_score(inputs: Inputs) -> dict[str, float]:
    from uvit_decay.metrics.inception_score import inception_score

    mean, std = inception_score(inputs.samples.tensor("logits"), SPLITS)
    return {"is": mean, "is_std": std}


def _mind(inputs: Inputs) -> dict[str, float]:
    from uvit_decay.metrics.mind import mind

    real, fake = inputs.pair()
    return {"mind": mind(real, fake, PROJECTIONS)}


def _precision_recall(inputs: Inputs) -> dict[str, float]:
    from uvit_decay.metrics.precision_recall import precision_recall

    real, fake = inputs.pair()
    precision, recall = precision_recall(real, fake, k=NEIGHBOURS)
    return {"precision": precision, "recall": recall}


FULL_RANK = "the covariance of fewer images than features says little; take more, use KID or KDD, or set `allow_few`"


def _frechet(inputs: Inputs) -> dict[str, float]:
    name = FRECHET_NAMES.get(inputs.extractor.family, "fd")
    return {name: _measure_frechet(inputs, "features")}


def _spatial_frechet(inputs: Inputs) -> dict[str, float]:
    return {"sfid": _measure_frechet(inputs, "spatial")}


def _measure_frechet(inputs: Inputs, kind: Literal["features", "spatial"]) -> float:
    from uvit_decay.metrics.frechet import frechet_distance

    real = inputs.reference.statistics(kind)
    fake = inputs.samples.statistics(kind)
    return frechet_distance(real, fake)


def _require_full_rank(options: MetricOptions, width: int) -> int:
    return 2 if options.allow_few else width + 1


def _kernel(inputs: Inputs) -> dict[str, float]:
    from uvit_decay.metrics.kid import kernel_distance

    name = KERNEL_NAMES.get(inputs.extractor.family, "kid")
    real, fake = inputs.pair()
    mean, std = kernel_distance(real, fake, subset_size=inputs.options.kid_subset)
    return {name: mean, f"{name}_std": std}


DISTANCE = "Fréchet distance between the features of samples and reference"
OF_DINOV2 = "Fréchet distance between the DINOv2 features of samples and reference"
KERNEL = "kernel distance between {}features; unbiased, about 0 at best"
METRICS = {
    "fd": Metric(
        {
            "fid": Value("FID", 2, "lower", DISTANCE),
            "fd": Value("FD", 2, "lower", DISTANCE),
            "fdd": Value("FDD", 2, "lower", OF_DINOV2),
        },
        _frechet,
        least=_require_full_rank,
        advice=FULL_RANK,
        names=FRECHET_NAMES,
    ),
    "is": Metric(
        {"is": Value("Inception Score", 2, "higher", "samples are recognisable, and of many classes")},
        _inception_score,
        needs="logits",
        compares_with="nothing",
        least=lambda options, width: SPLITS,
        settings=lambda options: {"is_splits": SPLITS},
    ),
    "kid": Metric(
        {
            "kid": Value("KID", 5, "lower", KERNEL.format("")),
            "kdd": Value("KDD", 5, "lower", KERNEL.format("DINOv2 ")),
        },
        _kernel,
        compares_with="images",
        least=lambda options, width: options.kid_subset,
        advice="set `kid_subset` to {n} or less",
        settings=lambda options: {"kid_subset": options.kid_subset},
        names=KERNEL_NAMES,
    ),
    "prc": Metric(
        {
            "precision": Value("Precision", 3, "higher", "share of samples that lie among the reference images"),
            "recall": Value("Recall", 3, "higher", "share of reference images that lie among the samples"),
        },
        _precision_recall,
        compares_with="images",
        least=lambda options, width: NEIGHBOURS + 1,
    ),
    "sfid": Metric(
        {"sfid": Value("sFID", 2, "lower", "the same with spatial features: composition rather than content")},
        _spatial_frechet,
        needs="spatial",
        least=_require_full_rank,
        advice=FULL_RANK,
        by_default=False,
    ),
    "mind": Metric(
        {"mind": Value("MIND", 3, "lower", "scaled sliced Wasserstein distance of features; useful from 5,000")},
        _mind,
        compares_with="images",
        settings=lambda options: {"mind_projections": PROJECTIONS, "mind_scale": "3 d"},
        by_default=False,
    ),
}
# A value of every class-conditional comparison whose extractor knows the classes; it cannot be chosen by --metrics.
CONSISTENCY = "label_consistency"
# Beside every value from a classifier that was trained for the comparison: how good the classifier is.
CLASSIFIER_ACCURACY = "classifier_accuracy"
OF_CLASSIFIER = Value("Classifier accuracy", 3, "higher", "of the small classifier, on images held out of its training")
OF_LABELS = Value("Label consistency", 3, "higher", "share of samples that the classifier assigns to their class")


def name_all_metrics() -> dict[str, Metric]:
    """Return all metrics by each of their names."""
    named = {}
    for name, metric in METRICS.items():
        named |= dict.fromkeys((name, *metric.names.values()), metric)
    return named


def name_metrics(extractor: Extractor) -> dict[str, Metric]:
    """Return all metrics by their names for the features of an extractor."""
    return {metric.names.get(extractor.family, name): metric for name, metric in METRICS.items()}


def collect_values() -> dict[str, Value]:
    """Return the display of every value of all metrics, by the name of the value."""
    values: dict[str, Value] = {}
    for metric in METRICS.values():
        values |= metric.values
    return values


def format_title(name: str, title: str, extractor: str) -> str:
    """Return the title of a value for readers: `title`, but FD with the features in brackets.

    Args:
        name: name of the value.
        title: its title.
        extractor: fingerprint of the extractor.
    """
    if name != "fd":
        return title
    features = re.sub("-[0-9a-f]{12}$", "", extractor)
    return f"FD ({features})"


SHORT = {"is": "IS", "precision": "precision", "recall": "recall"}  # names in a line of text, if not the title


def summary(values: Mapping[str, float], extractor: str, real: Mapping[str, float] | None = None) -> str:
    """Return values in a line, such as "FD (small-cnn-2) 0.62 (real images 0.13), IS 6.54 +- 0.27".

    Args:
        values: the values by name.
        extractor: fingerprint of the extractor.
        real: values of real images by name, which stand beside them; None for none.
    """
    known = collect_values()
    parts = []
    for name, value in values.items():
        if name.endswith("_std"):
            continue
        decimals = 3
        title = name.replace("_", " ")
        if name in known:
            decimals = known[name].decimals
            title = SHORT.get(name, known[name].title)
        part = f"{format_title(name, title, extractor)} {value:.{decimals}f}"
        spread = values.get(f"{name}_std")
        if spread is not None:
            part += f" +- {spread:.{decimals}f}"
        if name in (real or {}):
            part += f" (real images {real[name]:.{decimals}f})"
        parts.append(part)
    return ", ".join(parts)


@check_types
@dataclass(frozen=True)
class MetricOptions:
    """Metrics.

    Args:
        metrics: some of fd,fid,fdd,is,kid,kdd,prc,sfid,mind; default: all but sfid and mind, as far as features and
            reference allow.
        kid_subset: images in each random subset of KID.
        allow_few: allow Frechet distances of fewer images than features.
    """

    metrics: tuple[str, ...] | None = None
    kid_subset: Annotated[int, Bounds(2, 2**31 - 1), Advanced] = 1000
    allow_few: Annotated[bool, Advanced] = False

    def __post_init__(self) -> None:
        named = name_all_metrics()
        if not named.keys() >= set(self.metrics or ()):
            known = ",".join(named)
            raise UserError(f"choose some of {known}, got {','.join(self.metrics)!r}", argument="metrics")

    @property
    def spatial(self) -> bool:
        """True if a chosen metric needs spatial features, which extractors yield only on request."""
        named = name_all_metrics()
        return any(named[name].needs == "spatial" for name in self.metrics or ())

    def check_names(self, extractor: Extractor) -> None:
        """Raise a UserError if a chosen metric cannot be computed from the features or has another name for them.

        The extractor's weights need not be loaded. Without them, the outputs of an extractor with a user's file are
        unknown and not checked.
        """
        named = name_metrics(extractor)
        lacking = [name for name, metric in named.items() if _lacks_output(extractor, metric)]
        for name in self.metrics or ():
            if name not in named:
                own = ",".join(other for other in named if other not in lacking)
                text = f"{name} is not for features {extractor.name}: choose some of {own}"
                raise UserError(text, argument="metrics")
            if name in lacking:
                text = f"{name} needs {named[name].needs}, but {extractor.name} yields none: leave it out"
                raise UserError(text, argument="metrics")

    def choose(self, extractor: Extractor, images: int) -> tuple[str, ...]:
        """Return the names of the chosen metrics, or of all default metrics that are possible.

        Args:
            extractor: the extractor, prepared.
            images: number of samples or of reference images, whichever is smaller; 0 without reference images.
        """
        self.check_names(extractor)
        if self.metrics:
            return self.metrics
        return tuple(name for name, obstacle in self._find_obstacles(extractor, images).items() if obstacle is None)

    def explain_omissions(self, extractor: Extractor, images: int) -> dict[str, str]:
        """Return the default metrics that `choose`, with the same arguments, leaves out, each with the reason."""
        if self.metrics:
            return {}
        return {name: obstacle for name, obstacle in self._find_obstacles(extractor, images).items() if obstacle}

    def _find_obstacles(self, extractor: Extractor, images: int) -> dict[str, str | None]:
        """Return, for each default metric of this extractor, the reason why it is not possible, or None."""
        obstacles = {}
        for name, metric in name_metrics(extractor).items():
            if not metric.by_default:
                continue
            least = metric.least(self, extractor.widths.get(metric.needs, 0))
            obstacle = None
            if _lacks_output(extractor, metric):
                obstacle = f"{extractor.name} yields no {metric.needs}"
            elif metric.compares_with == "images" and images == 0:
                obstacle = "the reference has only statistics"
            elif metric.compares_with == "images" and images < least:
                obstacle = f"{images} images on one side, it needs {least}: {metric.advice.format(n=images)}"
            obstacles[name] = obstacle
        return obstacles


def _lacks_output(extractor: Extractor, metric: Metric) -> bool:
    """Return whether an extractor does not yield what a metric needs; False while its outputs are unknown."""
    return bool(extractor.widths) and metric.needs not in extractor.widths
