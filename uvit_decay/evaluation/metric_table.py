"""The table of metrics of generated images: a metric is one entry of METRICS.

Commands, reports and the comparison of runs read the table; docs/extending.md shows how to add an entry. Metrics are
imported by the functions that compute them, so that --help needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from uvit_decay.runtime.command_line import Advanced, Bounds
from uvit_decay.runtime.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from uvit_decay.evaluation.feature_store import FeatureStore, Reference
    from uvit_decay.metrics.extractors import Extractor

SPLITS = 10  # parts of the Inception Score
NEIGHBOURS = 3  # k of precision and recall
PROJECTIONS = 1024  # directions of MIND
INCEPTION, DINOV2, OTHER = "inception", "dinov2", "other"  # families: of FID and KID, FDD and KDD, FD and KID


class Value(NamedTuple):
    """Display of a value: title, number of decimals, better direction, and an explanatory phrase."""

    title: str
    decimals: int
    better: Literal["lower", "higher"]
    meaning: str


class Inputs(NamedTuple):
    """Inputs of a metric; the device computes in float64."""

    samples: FeatureStore
    reference: Reference
    options: MetricOptions
    device: torch.device

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return the features of all reference images and of all samples, float32 (n, d) and (m, d), on the device."""
        return self.reference.tensor("features").to(self.device), self.samples.tensor("features").to(self.device)


@dataclass(frozen=True)
class Metric:
    """A metric.

    Args:
        values: the values that it yields, by name; a name `x_std` is the spread of `x`, and is not listed here.
        compute: function that returns the values by name.
        needs: the output of an extractor that it is computed from, "features", "logits" or "spatial".
        compares_with: what it needs of the reference: nothing, mean and covariance, or its single images.
        least: least number of images on either side, for the options and the width of the output that it needs.
        advice: remedy for fewer images; `{n}` stands for their number.
        settings: the options that its values depend on, by name, for reports.
        families: the families of extractors whose features it is named for.
        by_default: whether it is computed unless the user names metrics.
    """

    values: dict[str, Value]
    compute: Callable[[Inputs], dict[str, float]]
    needs: Literal["features", "logits", "spatial"] = "features"
    compares_with: Literal["nothing", "statistics", "images"] = "statistics"
    least: Callable[[MetricOptions, int], int] = lambda options, width: 2
    advice: str = "take more"
    settings: Callable[[MetricOptions], dict[str, Any]] = lambda options: {}
    families: Collection[str] = (INCEPTION, DINOV2, OTHER)
    by_default: bool = True


def _inception_score(inputs: Inputs) -> dict[str, float]:
    from uvit_decay.metrics.inception_score import inception_score

    mean, std = inception_score(inputs.samples.tensor("logits"), SPLITS)
    return {"is": mean, "is_std": std}


def _mind(inputs: Inputs) -> dict[str, float]:
    from uvit_decay.metrics.mind import mind

    return {"mind": mind(*inputs.pair(), PROJECTIONS)}


def _precision_recall(inputs: Inputs) -> dict[str, float]:
    from uvit_decay.metrics.precision_recall import precision_recall

    precision, recall = precision_recall(*inputs.pair(), k=NEIGHBOURS)
    return {"precision": precision, "recall": recall}


FULL_RANK = "the covariance of fewer images than features says little; take more, KID or KDD instead, or --allow-few"


def _frechet(name: str, value: Value, kind: Literal["features", "spatial"] = "features", **fields: Any) -> Metric:
    """Return the Fréchet distance of this name between features of one kind."""

    def compute(inputs: Inputs) -> dict[str, float]:
        from uvit_decay.metrics.frechet import frechet_distance

        return {name: frechet_distance(inputs.reference.statistics(kind), inputs.samples.statistics(kind))}

    least = lambda options, width: 2 if options.allow_few else width + 1  # noqa: E731
    return Metric({name: value}, compute, kind, least=least, advice=FULL_RANK, **fields)


def _kernel(name: str, value: Value, *families: str) -> Metric:
    """Return the kernel distance of this name."""

    def compute(inputs: Inputs) -> dict[str, float]:
        from uvit_decay.metrics.kid import kernel_distance

        mean, std = kernel_distance(*inputs.pair(), subset_size=inputs.options.kid_subset)
        return {name: mean, f"{name}_std": std}

    return Metric(
        {name: value},
        compute,
        compares_with="images",
        least=lambda options, width: options.kid_subset,
        advice="--kid-subset {n} or less",
        settings=lambda options: {"kid_subset": options.kid_subset},
        families=families,
    )


DISTANCE = "Fréchet distance between the features of samples and reference"
OF_DINOV2 = "Fréchet distance between the DINOv2 features of samples and reference"
KERNEL = "kernel distance between {}features; unbiased, about 0 at best"
METRICS = {
    "fid": _frechet("fid", Value("FID", 2, "lower", DISTANCE), families=(INCEPTION,)),
    "fd": _frechet("fd", Value("FD", 2, "lower", DISTANCE), families=(OTHER,)),
    "is": Metric(
        {"is": Value("Inception Score", 2, "higher", "samples are recognisable, and of many classes")},
        _inception_score,
        needs="logits",
        compares_with="nothing",
        least=lambda options, width: SPLITS,
        settings=lambda options: {"is_splits": SPLITS},
        families=(INCEPTION, OTHER),
    ),
    "kid": _kernel("kid", Value("KID", 5, "lower", KERNEL.format("")), INCEPTION, OTHER),
    "prc": Metric(
        {
            "precision": Value("Precision", 3, "higher", "share of samples that lie among the reference images"),
            "recall": Value("Recall", 3, "higher", "share of reference images that lie among the samples"),
        },
        _precision_recall,
        compares_with="images",
        least=lambda options, width: NEIGHBOURS + 1,
    ),
    "sfid": _frechet(
        "sfid",
        Value("sFID", 2, "lower", "the same with spatial features: composition rather than content"),
        "spatial",
        by_default=False,
    ),
    "mind": Metric(
        {"mind": Value("MIND", 3, "lower", "scaled sliced Wasserstein distance of features; useful from 5,000")},
        _mind,
        compares_with="images",
        settings=lambda options: {"mind_projections": PROJECTIONS, "mind_scale": "3 d"},
        by_default=False,
    ),
    # The same distances, by the names that they have between features of DINOv2.
    "fdd": _frechet("fdd", Value("FDD", 2, "lower", OF_DINOV2), families=(DINOV2,)),
    "kdd": _kernel("kdd", Value("KDD", 5, "lower", KERNEL.format("DINOv2 ")), DINOV2),
}


def displayed() -> dict[str, Value]:
    """Return the display of every value of all metrics, by the name of the value."""
    return {key: value for metric in METRICS.values() for key, value in metric.values.items()}


def on_screen(name: str, title: str, extractor: str) -> str:
    """Return how a value is called for readers: `title`; FD with the features, of an extractor's fingerprint."""
    return f"FD ({re.sub('-[0-9a-f]{12}$', '', extractor)})" if name == "fd" else title


@dataclass(frozen=True)
class MetricOptions:
    __doc__ = f"""Metrics.

    Args:
        metrics: some of {",".join(METRICS)}; default: {",".join(name for name in METRICS if METRICS[name].by_default)},
            as far as features and reference allow.
        kid_subset: images in each random subset of KID.
        allow_few: allow Frechet distances of fewer images than features.
    """

    metrics: tuple[str, ...] | None = None
    kid_subset: Annotated[int, Bounds(2, 2**31 - 1), Advanced] = 1000
    allow_few: Annotated[bool, Advanced] = False

    def __post_init__(self) -> None:
        if not METRICS.keys() >= set(self.metrics or ()):
            raise UserError(f"--metrics takes some of {','.join(METRICS)}, got {','.join(self.metrics)!r}")

    @property
    def spatial(self) -> bool:
        """Return whether a chosen metric needs spatial features, which extractors yield on request only."""
        return any(METRICS[name].needs == "spatial" for name in self.metrics or ())

    def check_names(self, extractor: Extractor) -> None:
        """Raise a UserError for a chosen metric that is not of features of this family; the weights may be absent."""
        for name in self.metrics or ():
            if extractor.family not in METRICS[name].families:
                others = {key: other.needs for key, other in METRICS.items() if extractor.family in other.families}
                known = extractor.widths or others.values()  # those of a user's file are known once it is loaded
                own = ",".join(key for key, needs in others.items() if needs in known)
                raise UserError(f"--metrics {name} is not of {extractor.name}, whose metrics are {own}")

    def chosen(self, extractor: Extractor, images: int) -> tuple[str, ...]:
        """Return the names of the chosen metrics, else of all by default that are possible.

        `images` is the number of samples or of reference images, whichever is less; 0 leaves out what compares images.

        Raises:
            UserError: a chosen metric that is not of this extractor's features.
        """
        self.check_names(extractor)
        for name in self.metrics or ():
            if METRICS[name].needs not in extractor.widths:
                raise UserError(f"--metrics {name} needs {METRICS[name].needs}, which {extractor.name} does not yield")
        return self.metrics or tuple(name for name, obstacle in self._obstacles(extractor, images) if obstacle is None)

    def left_out(self, extractor: Extractor, images: int) -> dict[str, str]:
        """Return the metrics by default that `chosen` leaves out, each with the reason; arguments as of `chosen`."""
        obstacles = () if self.metrics else self._obstacles(extractor, images)
        return {name: obstacle for name, obstacle in obstacles if obstacle is not None}

    def _obstacles(self, extractor: Extractor, images: int) -> Iterator[tuple[str, str | None]]:
        """Yield the metrics by default of this extractor, and why one is not possible, or None."""
        for name, metric in METRICS.items():
            if not metric.by_default or extractor.family not in metric.families:
                continue
            least = metric.least(self, extractor.widths.get(metric.needs, 0))
            obstacle = None
            if metric.needs not in extractor.widths:
                obstacle = f"{extractor.name} yields no {metric.needs}"
            elif metric.compares_with == "images" and images == 0:
                obstacle = "the reference has statistics only"
            elif metric.compares_with == "images" and images < least:
                obstacle = f"{images} images on one side, it needs {least}: {metric.advice.format(n=images)}"
            yield name, obstacle
