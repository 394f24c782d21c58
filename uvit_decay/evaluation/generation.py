"""Comparison of generated images with a reference: from image sources to values and metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from uvit_decay.evaluation.extract import Extraction
from uvit_decay.evaluation.feature_store import FeatureStore, Reference, StatisticsFile
from uvit_decay.evaluation.image_sources import ArrayImages, ImageSource
from uvit_decay.evaluation.metric_table import METRICS, Inputs, MetricOptions
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home


def open_reference(
    name: str, channels: int, image_size: int | None = None
) -> tuple[StatisticsFile | None, ImageSource | None]:
    """Open a reference: statistics, images, or both for ADM's reference files; arguments as of `open_images`."""
    path = at_home(name)
    if path.suffix.lower() != ".npz" or not path.exists():
        return None, open_images(name, channels, image_size)
    file = StatisticsFile(path)
    if not file.has("features"):
        return None, ArrayImages(path, channels)
    return file, ArrayImages(path, channels) if file.has_images else None


@dataclass(frozen=True)
class Comparison:
    """A comparison of samples with a reference in the features of one extractor.

    Args:
        samples: images to evaluate.
        file: reference statistics, or None.
        reference: reference images, or None; with both, only metrics that need single features use the images.
        extractor: prepared extractor, on `device`.
        device: device on which features are extracted.
        batch_size: images at a time; affects numbers only by rounding.
        options: choice and settings of the metrics.
    """

    samples: ImageSource
    file: StatisticsFile | None
    reference: ImageSource | None
    extractor: Extractor
    device: torch.device
    batch_size: int = 64
    options: MetricOptions = field(default_factory=MetricOptions)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics; a UserError if one needs what the extractor does not yield."""
        return self.options.chosen(self.extractor, self._fewest)

    @property
    def left_out(self) -> dict[str, str]:
        """Metrics by default that are not computed, each with the reason."""
        return self.options.left_out(self.extractor, self._fewest)

    @property
    def _fewest(self) -> int:
        """Number of images that can be compared one by one."""
        return 0 if self.reference is None else min(len(self.samples), len(self.reference))

    @property
    def reference_name(self) -> str:
        """The name of the reference images with their number, or of the file of statistics."""
        return self.file.path.stem if self.reference is None else f"{self.reference.name}-{len(self.reference)}"

    @property
    def name(self) -> str:
        """A name for keys and files, from samples, reference and extractor."""
        return f"{self.samples.name}-{len(self.samples)}_vs_{self.reference_name}_{self.extractor.name}"

    def default_name(self) -> str:
        """Return the default report name: readable, plus a hash of every setting that affects the numbers."""
        whole = {**self.metadata(), "metrics": self.metrics, "samples": self.samples.fingerprint()}
        if self.reference is not None:
            whole["images"] = self.reference.fingerprint()
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()
        return f"{self.name}_{digest[:8]}.json"

    def metadata(self) -> dict[str, Any]:
        """Return everything that the numbers depend on, as plain values."""
        reference: dict[str, Any] = {} if self.reference is None else self.reference.metadata()
        if self.file is not None:
            reference = {**reference, "statistics": self.file.path.name, **self.file.metadata}
        metadata = {"n": len(self.samples), "samples": self.samples.metadata(), "reference": reference}
        metadata["extractor"] = self.extractor.fingerprint()
        for name in self.metrics:
            metadata |= METRICS[name].settings(self.options)
        return metadata

    def check(self) -> None:
        """Raise a UserError for what would otherwise fail after hours: too few images, unsuitable statistics."""
        if self.file is not None:
            self.file.check(self.extractor)
        for name in self.metrics:
            metric = METRICS[name]
            if self.reference is None and metric.compares_with == "images":
                raise UserError(f"{name} compares single images, and {self.file.path} has statistics only")
            if self.reference is None and metric.compares_with == "statistics" and not self.file.has(metric.needs):
                raise UserError(f"{self.file.path} has no statistics for {name}")
            self._check_count(name, self.samples)
            if self.reference is not None and metric.compares_with != "nothing":
                self._check_count(name, self.reference)

    def _check_count(self, name: str, images: ImageSource) -> None:
        metric, n = METRICS[name], len(images)
        if n < 2:
            raise UserError(f"{images.name} has {n} images, metrics need 2 or more")
        least = metric.least(self.options, self.extractor.widths[metric.needs])
        if n < least:
            raise UserError(f"{images.name} has {n} images, {name} needs {least} or more: {metric.advice.format(n=n)}")

    def extract(
        self, folder: Path, processes: Processes, save_images: bool = False, show: bool = True, also: Sequence[str] = ()
    ) -> tuple[FeatureStore, Reference]:
        """Extract the features of both sides: the samples' into `folder`, the reference's into the cache.

        `also` names outputs of the extractor for the samples that no metric needs.
        """
        # The reference comes first: it is cached, and its errors appear before anything is sampled.
        reference = self.extract_reference(processes, show)
        keep = sorted({METRICS[name].needs for name in self.metrics} | {"features", *also})
        keep.append("images" if save_images else "shown")
        extraction = Extraction(self.extractor, self.device, self.batch_size, show)
        return extraction.run(self.samples, keep, processes, folder), reference

    def extract_reference(self, processes: Processes, show: bool = True) -> Reference:
        """Extract the features of the reference images if a metric needs them or the file lacks its statistics."""
        metrics = [METRICS[name] for name in self.metrics if METRICS[name].compares_with != "nothing"]
        covered = self.file is not None and all(
            metric.compares_with == "statistics" and self.file.has(metric.needs) for metric in metrics
        )
        if self.reference is None or covered:
            return Reference(self.file, None)
        keep = sorted({metric.needs for metric in metrics} | {"features"})
        extraction = Extraction(self.extractor, self.device, self.batch_size, show)
        return Reference(self.file, extraction.run(self.reference, keep, processes))

    def measure(self, samples: FeatureStore, reference: Reference) -> dict[str, float]:
        """Return the values of the metrics by name; call it on the first process, after `extract`."""
        device = torch.device("cpu") if self.device.type == "mps" else self.device  # Apple's GPUs lack float64
        inputs = Inputs(samples, reference, self.options, device)
        return {key: value for name in self.metrics for key, value in METRICS[name].compute(inputs).items()}
