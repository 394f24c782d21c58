"""Metrics of generated images, each computed from the features that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from uvit_decay.evaluation.statistics import StatisticsFile
from uvit_decay.evaluation.store import Store
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.metrics.frechet import Statistics, frechet_distance
from uvit_decay.metrics.inception_score import inception_score
from uvit_decay.metrics.kid import kernel_distance
from uvit_decay.metrics.precision_recall import precision_recall
from uvit_decay.runtime.errors import UserError


class Needs(NamedTuple):
    """Inputs of a metric: tensors of the samples, statistics and tensors of the reference."""

    samples: tuple[str, ...]
    statistics: str | None = None
    reference: tuple[str, ...] = ()


METRICS = {
    "fid": Needs(("features",), statistics="features"),
    "is": Needs(("logits",)),
    "kid": Needs(("features",), reference=("features",)),
    "prc": Needs(("features",), reference=("features",)),
    "sfid": Needs(("spatial",), statistics="spatial"),
}


@dataclass(frozen=True)
class Reference:
    """The reference of a comparison: a file of statistics, features of images, or both, as in ADM's files."""

    file: StatisticsFile | None
    store: Store | None

    def statistics(self, kind: str) -> Statistics:
        """Return mean and covariance of `kind`, from the file if it has them."""
        return self.file.statistics(kind) if self.file and self.file.has(kind) else self.store.statistics(kind)

    def tensor(self, kind: str) -> Tensor:
        """Return the features `kind` of the reference images, (n, d)."""
        return self.store.tensor(kind)


def chosen_metrics(words: str | None, extractor: Extractor, images: int, kid_subset: int) -> tuple[str, ...]:
    """Parse comma-separated names of metrics; None means all that are possible, except sfid.

    `images` is the number of samples or of reference images, whichever is less.

    Raises:
        UserError: unknown names, or metrics that need features which the extractor does not have.
    """
    if words is None:
        pairs = [*(["kid"] if images >= kid_subset else []), *(["prc"] if images > 3 else [])]
        return ("fid", *(["is"] if extractor.has_logits else []), *pairs)
    names = tuple(word.strip() for word in words.split(",") if word.strip())
    unknown = sorted(set(names) - set(METRICS))
    if unknown or not names:
        raise UserError(f"--metrics takes some of {','.join(METRICS)}, got {words!r}")
    if "is" in names and not extractor.has_logits:
        raise UserError(f"the Inception Score needs class logits, which {extractor.name} does not give")
    if "sfid" in names and not extractor.name.startswith("inception"):
        raise UserError(f"sfid is of Inception's own middle features, {extractor.name} has none")
    return names


def measure(
    metrics: Sequence[str], samples: Store, reference: Reference, kid_subset: int, device: torch.device
) -> dict[str, float]:
    """Compute metrics by name; `is` and `kid` come with a standard deviation, over splits and over subsets.

    Args:
        metrics: names in METRICS.
        samples: complete store of the samples, with the tensors that the metrics need.
        reference: reference with the statistics and tensors that the metrics need.
        kid_subset: images in each of the 100 random subsets of KID.
        device: device on which pairs of images are compared, in float64.

    Raises:
        UserError: too few images for a metric.
    """
    found: dict[str, float] = {}
    pair = ()
    if any(METRICS[name].reference for name in metrics):
        pair = tuple(side.tensor("features").to(device) for side in (reference, samples))
    for name in metrics:
        if name in ("fid", "sfid"):
            kind = METRICS[name].statistics
            found[name] = frechet_distance(reference.statistics(kind), samples.statistics(kind))
        elif name == "is":
            found["is"], found["is_std"] = inception_score(samples.tensor("logits"))
        elif name == "kid":
            found["kid"], found["kid_std"] = kernel_distance(*pair, subset_size=kid_subset)
        else:
            found["precision"], found["recall"] = precision_recall(*pair)
    return found
