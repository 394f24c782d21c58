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
from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.evaluation.image_sources import ArrayImages, ImageSource
from uvit_decay.evaluation.metric_table import METRICS, Inputs, MetricOptions
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.evaluation.statistics_file import Reference, StatisticsFile
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.progress import track


def open_reference(
    name: str, channels: int, image_size: int | None = None
) -> tuple[StatisticsFile | None, ImageSource | None]:
    """Open a reference: statistics, images, or both for ADM's reference files.

    Args:
        name: an .npz file of statistics or images, or a name as in `open_images`.
        channels: 1 for grey, 3 for RGB, as in `open_images`.
        image_size: size that image files are cropped to, as in `open_images`.

    Raises:
        UserError: there is no such reference, or it cannot be read.
    """
    path = at_home(name)
    if path.suffix.lower() != ".npz" or not path.exists():
        return None, open_images(name, channels, image_size)
    file = StatisticsFile(path)
    if not file.has("features"):
        return None, ArrayImages(path, channels)
    images = None
    if file.has_images:
        images = ArrayImages(path, channels)
    return file, images


@dataclass(frozen=True)
class Comparison:
    """A comparison of samples with a reference in the features of one extractor.

    Args:
        samples: images to evaluate.
        file: reference statistics, or None.
        reference: reference images, or None. With both, only metrics that need single features use the images.
        extractor: prepared extractor, on `device`.
        device: device on which features are extracted.
        batch_size: images at a time; affects values only by rounding.
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
        """Names of the metrics.

        Raises:
            UserError: a chosen metric needs an output that the extractor does not yield.
        """
        return self.options.choose(self.extractor, self._pairs)

    @property
    def left_out(self) -> dict[str, str]:
        """Default metrics that are not computed, each with the reason."""
        return self.options.explain_omissions(self.extractor, self._pairs)

    @property
    def _pairs(self) -> int:
        """Number of samples or of reference images, whichever is smaller; 0 without reference images."""
        if self.reference is None:
            return 0
        return min(len(self.samples), len(self.reference))

    @property
    def reference_name(self) -> str:
        """The name of the reference images with their number, or of the file of statistics."""
        if self.reference is None:
            return self.file.path.stem
        return f"{self.reference.name}-{len(self.reference)}"

    @property
    def name(self) -> str:
        """A name for keys and files, from samples, reference and extractor."""
        return f"{self.samples.name}-{len(self.samples)}_vs_{self.reference_name}_{self.extractor.name}"

    def default_name(self) -> str:
        """Return the default file name of the report, with a hash of every setting that affects the values."""
        settings = {**self.metadata(), "metrics": self.metrics, "samples": self.samples.fingerprint()}
        if self.reference is not None:
            settings["images"] = self.reference.fingerprint()
        text = json.dumps(settings, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"{self.name}_{digest[:8]}.json"

    def metadata(self) -> dict[str, Any]:
        """Return everything that the values depend on, as plain values."""
        reference: dict[str, Any] = {}
        if self.reference is not None:
            reference |= self.reference.metadata()
        if self.file is not None:
            reference |= {"statistics": self.file.path.name, **self.file.metadata}
        metadata = {"n": len(self.samples), "samples": self.samples.metadata(), "reference": reference}
        metadata["extractor"] = self.extractor.fingerprint()
        for name in self.metrics:
            metadata |= METRICS[name].settings(self.options)
        return metadata

    def check(self) -> None:
        """Check the inputs before the long extraction.

        Raises:
            UserError: there are too few images for a metric, or the statistics are unsuitable.
        """
        if self.file is not None:
            self.file.check(self.extractor)
        for name in self.metrics:
            metric = METRICS[name]
            if self.reference is None and metric.compares_with == "images":
                raise UserError(f"{name} needs reference images, but {self.file.path} has only statistics")
            if self.reference is None and metric.compares_with == "statistics" and not self.file.has(metric.needs):
                raise UserError(f"{name} needs statistics of {metric.needs}, but {self.file.path} has none")
            self._check_count(name, self.samples)
            if self.reference is not None and metric.compares_with != "nothing":
                self._check_count(name, self.reference)

    def _check_count(self, name: str, images: ImageSource) -> None:
        """Raise a UserError if there are too few images for a metric."""
        n = len(images)
        if n < 2:
            raise UserError(f"{images.name} has {n} images: metrics need 2 or more")
        metric = METRICS[name]
        least = metric.least(self.options, self.extractor.widths[metric.needs])
        if n < least:
            advice = metric.advice.format(n=n)
            raise UserError(f"{images.name} has {n} images, but {name} needs {least} or more: {advice}")

    def extract(
        self, folder: Path, processes: Processes, save_images: bool = False, also: Sequence[str] = ()
    ) -> tuple[FeatureStore, Reference]:
        """Extract the features of both sides: the samples' into `folder`, the reference's into the cache.

        Args:
            folder: folder of the store of the samples.
            processes: processes that share the work.
            save_images: store all samples, not only the first ones.
            also: outputs of the extractor to store for the samples although no metric needs them.
        """
        # The reference comes first: it is cached, and its errors appear before anything is sampled.
        reference = self.extract_reference(processes)
        outputs = {METRICS[name].needs for name in self.metrics}
        keep = sorted(outputs | {"features", *also})
        keep.append("images" if save_images else "shown")
        extraction = Extraction(self.extractor, self.device, self.batch_size)
        store = extraction.run(self.samples, keep, processes, folder)
        return store, reference

    def extract_reference(self, processes: Processes) -> Reference:
        """Extract the features of the reference images, unless the file has the statistics of all metrics."""
        from_file = self.file is not None
        outputs = {"features"}
        for name in self.metrics:
            metric = METRICS[name]
            if metric.compares_with == "nothing":
                continue
            outputs.add(metric.needs)
            if metric.compares_with == "images" or (from_file and not self.file.has(metric.needs)):
                from_file = False
        if self.reference is None or from_file:
            return Reference(self.file, None)
        extraction = Extraction(self.extractor, self.device, self.batch_size)
        store = extraction.run(self.reference, sorted(outputs), processes)
        return Reference(self.file, store)

    def measure(self, samples: FeatureStore, reference: Reference) -> dict[str, float]:
        """Return the values of the metrics by name; call it on the first process, after `extract`."""
        device = torch.device("cpu") if self.device.type == "mps" else self.device  # Apple's GPUs lack float64
        inputs = Inputs(samples, reference, self.options, device)
        values: dict[str, float] = {}
        with track("metrics", len(self.metrics), "metric") as work:
            for name in self.metrics:
                values |= METRICS[name].compute(inputs)
                work.update()
        return values
