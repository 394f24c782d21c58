"""Report of a comparison: values, remarks, nearest neighbours and coverage, as JSON and HTML."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.data.classes import in_words
from uvit_decay.evaluation.comparison import Comparison, are_same_classes
from uvit_decay.evaluation.extract import SHOWN
from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.evaluation.metric_table import format_title
from uvit_decay.evaluation.report_html import NO_CEILING, Ceiling, Neighbours, Report, write_html
from uvit_decay.evaluation.statistics_file import Reference
from uvit_decay.files.validation import write_json
from uvit_decay.files.writing import check_writable, claim_paths
from uvit_decay.metrics.precision_recall import find_covered, nearest
from uvit_decay.pictures import grid_columns, save_npz
from uvit_decay.runtime.distributed import Processes
from uvit_decay.terminal.errors import with_flags

COMPARABLE = 10_000  # samples; distances decrease with their number, and published values use 50,000
ROWS = 6  # samples in the memorisation check
NEAREST = 6  # nearest reference images of each of them
FEWEST = 10  # smallest number of samples and of reference images of a class for which coverage is reported
COLUMNS = 10  # of the grid of samples


def write_reports(
    comparison: Comparison,
    out: Path,
    save_samples: Path | None,
    processes: Processes,
    real: Comparison | None = None,
) -> None:
    """Extract all features on these processes; rank 0 computes the metrics, prints them and writes the reports.

    Args:
        comparison: comparison, already checked.
        out: JSON file of the report. The HTML file is written beside it, and so is the store of the samples' features,
            which is deleted at the end.
        save_samples: .npz file to which all samples are written; None for no such file.
        processes: processes that share the work.
        real: comparison of real images, such as the test set, whose values stand beside the samples'; None for none.
    """
    files = [out, out.with_suffix(".html")]
    if save_samples is not None:
        files.append(save_samples)
    for file in files:
        check_writable(file)
    with claim_paths(*files, first=processes.is_main):
        store, reference = comparison.extract(out.with_suffix(".features"), processes, save_samples is not None)
        ceiling = NO_CEILING
        if real is not None:
            ceiling = Ceiling(real.name, real.measure_real(reference, processes))
        if not processes.is_main:
            return
        report = replace(build_report(comparison, store, reference), ceiling=ceiling)
        write_json(out, _collect_content(comparison, report))
        write_html(out.with_suffix(".html"), report)
        if save_samples is not None:
            save_npz(save_samples, store.iterate("images"), len(store), comparison.samples.labels)
        store.remove()
    _print_values(report)
    for remark in report.remarks:
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {out.with_suffix('.html').name}")


def _collect_content(comparison: Comparison, report: Report) -> dict[str, Any]:
    """Return the content of the JSON file."""
    content = {
        "metrics": {f"{name}/{comparison.name}": value for name, value in report.metrics.items()},
        "values": report.metrics,
        "coverage": report.coverage,
        "protocol": report.protocol,
        "remarks": report.remarks,
    }
    if report.ceiling.values:
        named = {f"{name}/{report.ceiling.name}": value for name, value in report.ceiling.values.items()}
        content["ceiling"] = {"metrics": named, "values": report.ceiling.values}
    return content


def _print_values(report: Report) -> None:
    """Print a line for each value, with the value of real images beside it."""
    ceiling = report.ceiling.values
    for name, value in report.metrics.items():
        line = f"{format_title(name, name, report.protocol['extractor'])} {value:.6g}"
        if name in ceiling:
            line += f" (real images {ceiling[name]:.6g})"
        print(line)
    if ceiling:
        print(f"real images: {report.ceiling.name}")


def build_report(comparison: Comparison, samples: FeatureStore, reference: Reference) -> Report:
    """Return the report of a comparison whose features have been extracted; call it on the first process."""
    images = _read_shown(samples)
    names, columns = _choose_columns(comparison.samples)
    full_rows = len(images) // columns * columns
    return Report(
        title=f"{comparison.samples.name} against {comparison.reference_name}",
        metrics=comparison.measure(samples, reference),
        protocol={**comparison.metadata(), "measured_nfe": samples.nfe},
        remarks=tuple(map(with_flags, remarks(comparison))),
        samples=images[: full_rows or len(images)],
        columns=columns,
        class_names=names,
        neighbours=_find_neighbours(comparison, images, samples, reference),
        coverage=_measure_coverage(comparison, samples, reference),
    )


def _read_shown(samples: FeatureStore) -> Tensor:
    """Return the first SHOWN images; a store may hold tens of thousands, so only these are read."""
    parts: list[Tensor] = []
    count = 0
    for part in samples.iterate("images"):
        parts.append(part[: SHOWN - count].clone())
        count += len(parts[-1])
        if count == SHOWN:
            break
    return torch.cat(parts)


def remarks(comparison: Comparison) -> tuple[str, ...]:
    """Return caveats for readers of the values, one sentence each."""
    n = len(comparison.samples)
    d = comparison.extractor.widths["features"]
    file = comparison.file
    lines = []
    if n < COMPARABLE:
        lines.append(f"{n:,} samples, below {COMPARABLE:,}: not comparable with published numbers")
    for kind, count in (("samples", n), ("reference images", comparison.reference_count)):
        if comparison.options.allow_few and count is not None and count <= d:
            lines.append(f"{count:,} {kind} for {d:,} features: the covariance does not have full rank")
    if file is not None and "extractor" not in file.metadata:
        lines.append(f"{file.path.name} does not record the extractor and resize with which it was made")
    if comparison.reference is not None:
        lines += _remark_differences(comparison.samples, comparison.reference)
    if (remark := comparison.extractor.remark()) is not None:
        lines.append(remark)
    lines += [f"without {name}: {reason}" for name, reason in comparison.left_out.items()]
    return tuple(lines)


def _remark_differences(samples: ImageSource, reference: ImageSource) -> list[str]:
    """Return caveats on different kinds and sizes of images."""
    lines = []
    if samples.has_jpegs != reference.has_jpegs:
        jpegs = samples.name if samples.has_jpegs else reference.name
        lines.append(f"{jpegs} are JPEGs and the other side is not: compression alone moves every metric")
    if samples.shape != reference.shape:
        _, height, width = samples.shape
        _, reference_height, reference_width = reference.shape
        sizes = f"{width}x{height} and {reference_width}x{reference_height}"
        lines.append(f"samples and reference differ in size, {sizes}; --image-size crops image files to one size")
    return lines


def _choose_columns(images: ImageSource) -> tuple[tuple[str, ...], int]:
    """Return class names above the columns of the sample grid, empty for none, and the number of columns.

    Samples usually have the classes in turn. With ten classes or fewer, a multiple of their number as the number of
    columns puts one class into each column. Names are returned if the labels follow this pattern.
    """
    if images.labels is None:
        return (), COLUMNS
    count = len(images.class_names)
    shown = images.labels[:SHOWN]
    columns = COLUMNS
    if 0 < count <= COLUMNS:
        columns = grid_columns(count)
    in_turn = torch.arange(len(shown)) % columns % max(count, 1)
    if not torch.equal(shown, in_turn):
        return (), COLUMNS
    names = in_words(images.class_names)
    return tuple(names[i % count] for i in range(columns)), columns


def _find_neighbours(
    comparison: Comparison, shown: Tensor, samples: FeatureStore, reference: Reference
) -> Neighbours | None:
    """Return the shown samples that are nearest to reference images, where copies would appear."""
    if reference.store is None:
        return None
    real = reference.tensor("features")
    fake = samples.tensor("features")[: len(shown)]
    distances, indices = nearest(fake, real, min(NEAREST, len(real)))
    rows = distances[:, 0].argsort(stable=True)[:ROWS]
    images = [comparison.reference.read(row.tolist()).cpu() for row in indices[rows]]
    return Neighbours(shown[rows], torch.stack(images), distances[rows].float())


def _measure_coverage(comparison: Comparison, samples: FeatureStore, reference: Reference) -> dict[str, float] | None:
    """Return, per class, the share of reference images that have a sample of the class in their neighbourhood."""
    ours = comparison.samples
    theirs = comparison.reference
    if reference.store is None or ours.labels is None or not are_same_classes(ours.class_names, theirs.class_names):
        return None
    real = reference.tensor("features")
    fake = samples.tensor("features")
    coverage = {}
    for label, name in enumerate(theirs.class_names):
        real_of_class = real[theirs.labels == label]
        fake_of_class = fake[ours.labels == label]
        if len(real_of_class) >= FEWEST and len(fake_of_class) >= FEWEST:
            coverage[name] = float(find_covered(real_of_class, fake_of_class).double().mean())
    return coverage or None
