"""Evaluation of generated images: from image sources to the report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from uvit_decay.evaluation.extract import SHOWN, about, extract, parts_of
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.evaluation.metric_table import METRICS, Reference, measure
from uvit_decay.evaluation.report import Neighbours, Report
from uvit_decay.evaluation.statistics import SPATIAL, StatisticsFile
from uvit_decay.evaluation.store import Store
from uvit_decay.image_io import grid_columns
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.metrics.precision_recall import density_coverage, nearest
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import replacing

COMPARABLE = 10_000  # samples; FID decreases with their number, and published values use 50,000
PUBLISHED = "6726825d"  # start of the sha256 of the Inception weights behind all published numbers
SPLITS = 10  # subsets of the Inception Score
ROWS, NEAREST = 6, 6  # rows and columns of the memorisation check
FEWEST = 10  # fewest samples and reference images of a class for which coverage is reported


@dataclass(frozen=True)
class Comparison:
    """A comparison of samples with a reference in the features of one extractor.

    Args:
        samples: images to evaluate.
        file: reference statistics, or None.
        reference: reference images, or None; with both, only metrics that need single features use the images.
        extractor: prepared extractor, on `device`.
        metrics: names in `measure.METRICS`.
        device: device on which features are extracted.
        batch_size: images at a time; affects numbers only by rounding.
        kid_subset: images in each random subset of KID.
        allow_few: allow fewer images than features.
    """

    samples: ImageSource
    file: StatisticsFile | None
    reference: ImageSource | None
    extractor: Extractor
    metrics: tuple[str, ...]
    device: torch.device
    batch_size: int = 64
    kid_subset: int = 1000
    allow_few: bool = False

    def check(self) -> None:
        """Raise a UserError for what would otherwise fail after hours: too few images, unsuitable statistics."""
        if self.file is not None:
            self.file.check(self.extractor)
        for name in self.metrics:
            needs = METRICS[name]
            if needs.reference and self.reference is None:
                raise UserError(f"{name} compares single images, and {self.file.path} has statistics only")
            if needs.statistics and self.reference is None and not self.file.has(needs.statistics):
                raise UserError(f"{self.file.path} has no statistics for {name}")
        if "is" in self.metrics and len(self.samples) < SPLITS:
            raise UserError(f"the Inception Score of {SPLITS} splits needs as many samples, got {len(self.samples)}")
        if "kid" in self.metrics and self.kid_subset < 2:
            raise UserError(f"--kid-subset must be at least 2, got {self.kid_subset}")
        for images in (self.samples, self.reference):
            if images is not None:
                self._check_count(images)

    def _check_count(self, images: ImageSource) -> None:
        count = f"{images.name} has {len(images)} images"
        fewest = 4 if "prc" in self.metrics else 2
        if len(images) < fewest:
            raise UserError(f"{count}, these metrics need {fewest} or more")
        dims = [{"fid": self.extractor.dim, "sfid": SPATIAL}[name] for name in self.metrics if name in ("fid", "sfid")]
        if dims and len(images) <= max(dims) and not self.allow_few:
            raise UserError(
                f"{count}: the covariance of {max(dims)} features needs more, and the distance of fewer says little; "
                "take more, --metrics kid, or --allow-few"
            )
        if "kid" in self.metrics and len(images) < self.kid_subset:
            raise UserError(f"{count}, KID takes subsets of {self.kid_subset}: --kid-subset {len(images)} or less")

    def extracted(
        self, folder: Path, processes: Processes, save_images: bool = False, show: bool = True
    ) -> tuple[Store, Reference]:
        """Extract the features of both sides: the samples' into `folder`, the reference's into the cache."""
        # The reference comes first: it is cached, and its errors appear before anything is sampled.
        reference = Reference(self.file, self.reference_features(processes, show))
        keep = sorted({kind for name in self.metrics for kind in METRICS[name].samples} | {"features"})
        keep.append("images" if save_images else "shown")
        what = about(self.samples, self.extractor, keep)
        samples = Store(folder, what, parts_of(len(self.samples)))
        extract(self.samples, self.extractor, samples, keep, self.batch_size, processes, self.device, show)
        return samples, reference

    def reference_features(self, processes: Processes, show: bool = True) -> Store | None:
        """Extract the features of the reference images if a metric needs them or the file lacks its statistics."""
        needs = [METRICS[name] for name in self.metrics]
        wanted = any(need.reference for need in needs) or any(
            need.statistics and not (self.file and self.file.has(need.statistics)) for need in needs
        )
        if self.reference is None or not (wanted or self.file is None):
            return None
        keep = ["features", *(["spatial"] if "sfid" in self.metrics else [])]
        return cached_features(self.reference, self.extractor, keep, self.batch_size, processes, self.device, show)

    def measure(self, samples: Store, reference: Reference) -> dict[str, float]:
        """Return the values of the metrics; call it on the first process, after `extracted`."""
        where = torch.device("cpu") if self.device.type == "mps" else self.device  # Apple's GPUs lack float64
        return measure(self.metrics, samples, reference, self.kid_subset, where)

    def report(self, samples: Store, reference: Reference) -> Report:
        """Build the report; call it on the first process, after `extracted`."""
        values = self.measure(samples, reference)
        shown = torch.cat(list(samples.iterate("images")))[:SHOWN]
        names, columns = self._columns()
        return Report(
            title=f"{self.samples.name} against {self.reference_name}",
            metrics=values,
            protocol={**self.metadata(), "measured_nfe": float(samples.tensor("calls").sum()) / len(self.samples)},
            remarks=self.remarks(),
            samples=shown[: len(shown) // columns * columns or len(shown)],
            columns=columns,
            class_names=names,
            neighbours=self._neighbours(shown, samples, reference),
            coverage=self._coverage(samples, reference),
        )

    def _columns(self) -> tuple[tuple[str, ...], int]:
        """Return class names above the columns of the sample grid (empty for none), and the number of columns."""
        # Samples usually take the classes in turn. With ten classes or fewer, a number of columns that is a multiple of
        # theirs puts one class into each column; names are given if the labels do follow that pattern.
        count = len(self.samples.class_names)
        columns = grid_columns(count) if 0 < count <= 10 else 10
        labels = self.samples.labels
        if labels is None or not torch.equal(
            labels[:SHOWN], torch.arange(len(labels[:SHOWN])) % columns % max(count, 1)
        ):
            return (), 10
        return tuple(self.samples.class_names[i % count] for i in range(columns)), columns

    def _neighbours(self, shown: torch.Tensor, samples: Store, reference: Reference) -> Neighbours | None:
        """Return the shown samples that are nearest to reference images, where copies would appear."""
        if reference.store is None:
            return None
        keys = reference.tensor("features")
        distances, indices = nearest(samples.tensor("features")[: len(shown)], keys, min(NEAREST, len(keys)))
        rows = distances[:, 0].argsort(stable=True)[:ROWS]
        found = torch.stack([self.reference.read(row.tolist()).cpu() for row in indices[rows]])
        return Neighbours(shown[rows], found, distances[rows].float())

    def _coverage(self, samples: Store, reference: Reference) -> dict[str, float] | None:
        """Return, per class, the share of reference images that have a sample of the class in their neighbourhood."""
        if reference.store is None or self.samples.labels is None or self.reference.labels is None:
            return None
        if self.samples.class_names != self.reference.class_names:
            return None
        real, fake = reference.tensor("features"), samples.tensor("features")
        covered = {}
        for label, name in enumerate(self.reference.class_names):
            pair = real[self.reference.labels == label], fake[self.samples.labels == label]
            if min(map(len, pair)) >= FEWEST:
                covered[name] = float(density_coverage(*pair)[1].double().mean())
        return covered or None

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
        return {
            "n": len(self.samples),
            "samples": self.samples.metadata(),
            "reference": self._about_reference(),
            "extractor": self.extractor.fingerprint(),
            **({"is_splits": SPLITS} if "is" in self.metrics else {}),
            **({"kid_subset": self.kid_subset} if "kid" in self.metrics else {}),
        }

    def _about_reference(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.reference is None else self.reference.metadata()
        return found if self.file is None else {**found, "statistics": self.file.path.name, **self.file.about}

    def remarks(self) -> tuple[str, ...]:
        """Return caveats for readers of the numbers, one sentence each."""
        n, said = len(self.samples), []
        if n < COMPARABLE:
            said.append(f"{n:,} samples, below {COMPARABLE:,}: not comparable with published numbers")
        if self.allow_few and n <= self.extractor.dim:
            said.append(f"{n:,} samples for {self.extractor.dim:,} features: the covariance has not full rank")
        if self.file is not None and "extractor" not in self.file.about:
            said.append(f"{self.file.path.name} does not say by which extractor and resize it was made")
        if self.reference is not None:
            if self.samples.has_jpegs != self.reference.has_jpegs:
                has_jpegs = self.samples.name if self.samples.has_jpegs else self.reference.name
                said.append(f"{has_jpegs} are JPEGs and the other side is not: compression alone moves every metric")
            if self.samples.shape != self.reference.shape:
                sizes = (f"{p.shape[2]}x{p.shape[1]}" for p in (self.samples, self.reference))
                said.append(f"samples and reference differ in size, {' and '.join(sizes)}")
        if not self.extractor.name.startswith("inception"):
            said.append(f"features of {self.extractor.name}, not Inception's: no FID of papers compares")
        elif PUBLISHED not in self.extractor.fingerprint():
            said.append("these Inception weights are not the published ones: the numbers compare with nothing else")
        return tuple(said)


def cached_features(
    images: ImageSource,
    extractor: Extractor,
    keep: Sequence[str],
    batch_size: int,
    processes: Processes,
    device: torch.device,
    show: bool = True,
) -> Store:
    """Return the features of a reference, which are extracted once per machine and cached."""
    store = Store.cached(about(images, extractor, keep), parts_of(len(images)))
    extract(images, extractor, store, keep, batch_size, processes, device, show)
    return store


def save_json(path: Path, comparison: Comparison, report: Report) -> None:
    """Write the metrics, under keys that name the comparison, and the whole protocol as JSON."""
    content = {
        "metrics": {f"{name}/{comparison.name}": value for name, value in report.metrics.items()},
        "values": report.metrics,
        "coverage": report.coverage,
        "protocol": report.protocol,
        "remarks": list(report.remarks),
    }
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
