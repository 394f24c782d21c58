"""Comparison of generated images with a reference: from image sources to values and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from uvit_decay.encoders.extractors import Extractor
from uvit_decay.evaluation.extract import Extraction
from uvit_decay.evaluation.extractor_cache import hash_metadata
from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.evaluation.image_sources import ArrayImages, ChosenImages, ImageSource, describe_file
from uvit_decay.evaluation.metric_table import (
    CLASSIFIER_ACCURACY,
    CONSISTENCY,
    Inputs,
    Metric,
    MetricOptions,
    name_metrics,
)
from uvit_decay.evaluation.open_by_name import open_images
from uvit_decay.evaluation.statistics_file import Reference, StatisticsFile
from uvit_decay.files.writing import at_home
from uvit_decay.metrics.consistency import label_consistency
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.random import subset
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.progress import track
from uvit_decay.terminal.typed import check_types

MOST_REFERENCE = 50_000  # training images in a reference, and images on which a small classifier is trained


@check_types
def open_reference(
    name: str, channels: Literal[1, 3], image_size: int | None = None, on_white: bool = True
) -> tuple[StatisticsFile | None, ImageSource | None]:
    """Open a reference: statistics, images, or both for ADM's reference files.

    Args:
        name: an .npz file of statistics or images, or a name as in `open_images`.
        channels: 1 for grey, 3 for RGB, as in `open_images`.
        image_size: size that image files are cropped to, as in `open_images`.
        on_white: whether transparent image files are put on white, as in `open_images`.
    """
    path = at_home(name)
    if path.suffix.lower() != ".npz" or not path.exists():
        return None, open_images(name, channels, image_size, on_white)
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
        """Names of the metrics, without the label consistency."""
        return self.options.choose(self.extractor, self._pairs)

    @property
    def _entries(self) -> dict[str, Metric]:
        """The entries of the metrics in the table, by name."""
        named = name_metrics(self.extractor)
        return {name: named[name] for name in self.metrics}

    @property
    def left_out(self) -> dict[str, str]:
        """Default metrics that are not computed, each with the reason."""
        omissions = self.options.explain_omissions(self.extractor, self._pairs)
        if self.extractor.class_names is not None and self._label_obstacle is not None:
            omissions[CONSISTENCY] = self._label_obstacle
        return omissions

    @property
    def _label_obstacle(self) -> str | None:
        """Reason why the labels of the samples are not compared with the extractor's logits; None if they are."""
        theirs = self.extractor.class_names
        ours = self.samples.class_names
        if not theirs:
            return f"{self.extractor.name} has no classifier with named classes"
        if self.samples.labels is None:
            return f"{self.samples.name} has no labels"
        if are_same_classes(ours, theirs):
            return None
        return (
            f"{self.samples.name} has other classes ({_shorten(ours)}) than {self.extractor.name} ({_shorten(theirs)})"
        )

    @property
    def _pairs(self) -> int:
        """Number of samples or of reference images, whichever is smaller; 0 without reference images."""
        if self.reference is None:
            return 0
        return min(len(self.samples), len(self.reference))

    @property
    def reference_count(self) -> int | None:
        """Number of reference images whose statistics are compared; None if their file does not record it."""
        if self.file is None:
            return len(self.reference)
        count = self.file.metadata.get("n")
        return count if isinstance(count, int) else None

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
        if self.file is not None:
            settings["statistics"] = describe_file("file", self.file.path)
        return f"{self.name}_{hash_metadata(settings)[:8]}.json"

    def metadata(self) -> dict[str, Any]:
        """Return everything that the values depend on, as plain values."""
        reference: dict[str, Any] = {}
        if self.reference is not None:
            reference |= self.reference.metadata()
        if self.file is not None:
            reference |= {"statistics": self.file.path.name, **self.file.metadata}
        metadata = {"n": len(self.samples), "samples": self.samples.metadata(), "reference": reference}
        metadata["extractor"] = self.extractor.fingerprint()
        metadata |= self.extractor.describe()
        for metric in self._entries.values():
            metadata |= metric.settings(self.options)
        return metadata

    def check(self) -> None:
        """Raise a UserError if there are too few images for a metric, or if the statistics are unsuitable."""
        if self.file is not None:
            self.file.check(self.extractor)
        for name, metric in self._entries.items():
            if self.reference is None and metric.compares_with == "images":
                raise UserError(f"{name} needs reference images, but {self.file.path} has only statistics")
            if self.reference is None and metric.compares_with == "statistics" and not self.file.has(metric.needs):
                raise UserError(f"{name} needs statistics of {metric.needs}, but {self.file.path} has none")
            self._check_count(name, metric, self.samples.name, len(self.samples))
            if self.reference is not None and metric.compares_with != "nothing":
                self._check_count(name, metric, self.reference.name, len(self.reference))
            if self.reference_count is not None and metric.compares_with == "statistics":
                self._check_count(name, metric, self.reference_name, self.reference_count)

    def _check_count(self, name: str, metric: Metric, source: str, n: int) -> None:
        """Raise a UserError if a source has too few images for a metric."""
        least = self._least(metric)
        if n < least:
            advice = metric.advice.format(n=n)
            raise UserError(f"{source} has {n} images, but {name} needs {least} or more: {advice}")

    def _least(self, metric: Metric) -> int:
        """Return the least number of images on either side for a metric."""
        return metric.least(self.options, self.extractor.widths[metric.needs])

    def extract(self, folder: Path, processes: Processes, save_images: bool = False) -> tuple[FeatureStore, Reference]:
        """Extract the features of both sides: the samples' into `folder`, the reference's into the cache.

        Args:
            folder: folder of the store of the samples.
            processes: processes that share the work.
            save_images: store all samples, not only the first ones.
        """
        # The reference comes first: it is cached, and its errors appear before anything is sampled.
        reference = self.extract_reference(processes)
        store = self._extract_samples(processes, "images" if save_images else "shown", folder)
        return store, reference

    def _extract_samples(
        self, processes: Processes, images: str | None = None, folder: Path | None = None
    ) -> FeatureStore:
        """Extract the features of the samples.

        Args:
            processes: processes that share the work.
            images: "images" to store all samples, "shown" for the first ones, None for none.
            folder: folder of the store; None for the cache, for images that do not depend on a network.
        """
        outputs = {"features", *(metric.needs for metric in self._entries.values())}
        if self._label_obstacle is None:
            outputs.add("logits")
        keep = sorted(outputs)
        if images is not None:
            keep.append(images)
        extraction = Extraction(self.extractor, self.device, self.batch_size)
        return extraction.run(self.samples, keep, processes, folder)

    def can_compare(self, images: ImageSource) -> bool:
        """Return whether there are enough real images for any metric."""
        return bool(self._list_possible(len(images)))

    def _list_possible(self, count: int) -> tuple[str, ...]:
        """Return the names of the metrics that this number of images is enough for."""
        return tuple(name for name, metric in self._entries.items() if count >= self._least(metric))

    def compare_real(self, images: ImageSource) -> Comparison:
        """Return the comparison of real images, instead of the samples, with the same reference.

        Distances depend on the number of images: as many are taken as there are samples, or all if there are fewer.
        Metrics for which these are too few are left out.
        """
        chosen = ChosenImages(images, subset(images, len(self.samples), "ceiling"))
        metrics = self._list_possible(len(chosen))
        if not metrics:
            raise UserError(f"{images.name} has {len(images)} images, too few for {', '.join(self.metrics)}")
        return replace(self, samples=chosen, options=replace(self.options, metrics=metrics))

    def measure_real(self, reference: Reference, processes: Processes) -> dict[str, float]:
        """Return the values of a comparison of real images, whose features are cached; empty on other processes.

        Args:
            reference: the extracted reference.
            processes: processes that share the work.
        """
        store = self._extract_samples(processes)
        if not processes.is_main:
            return {}
        values = self.measure(store, reference)
        values.pop(CLASSIFIER_ACCURACY, None)  # it is no value of these images
        return values

    def extract_reference(self, processes: Processes) -> Reference:
        """Extract the features of the reference images, unless the file has the statistics of all metrics."""
        from_file = self.file is not None
        outputs = {"features"}
        for metric in self._entries.values():
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
        inputs = Inputs(samples, reference, self.options, device, self.extractor)
        values: dict[str, float] = {}
        entries = self._entries
        with track("metrics", len(entries), "metric") as work:
            for metric in entries.values():
                values |= metric.compute(inputs)
                work.update()
        if self._label_obstacle is None:
            values[CONSISTENCY] = label_consistency(samples.tensor("logits"), self.samples.labels)
        if self.extractor.accuracy is not None:
            values[CLASSIFIER_ACCURACY] = self.extractor.accuracy
        return values


def are_same_classes(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return whether the classes of samples are those of the other side, in the same order.

    The labels of an array are numbers: they count the other side's classes, and the last ones may be missing. Folders
    whose names are numbers are sorted as text, "0", "1", "10", so numbers do not count them.
    """
    if ours == theirs:
        return True
    sides = (ours, theirs)
    if any(all(name.isdecimal() for name in side) and not _are_numbers(side) for side in sides):
        return False
    return any(map(_are_numbers, sides)) and len(ours) <= len(theirs)


def _are_numbers(names: Sequence[str]) -> bool:
    """Return whether classes have numbers instead of names."""
    return list(names) == [str(i) for i in range(len(names))]


def _shorten(names: Sequence[str]) -> str:
    """Return the number of classes and the first names as text."""
    shown = names[:3]
    if len(names) > 3:
        shown = (*shown, "...")
    return f"{len(names)}: {', '.join(shown)}"
