"""Report of a comparison: remarks, nearest neighbours and coverage beside the values, as JSON and HTML."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from uvit_decay.class_names import in_words
from uvit_decay.evaluation.extract import SHOWN
from uvit_decay.evaluation.feature_store import FeatureStore, Reference
from uvit_decay.evaluation.generation import Comparison
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.evaluation.metric_table import on_screen
from uvit_decay.evaluation.report_html import Neighbours, Report, write_html
from uvit_decay.image_io import grid_columns, save_npz
from uvit_decay.metrics.precision_recall import covered, nearest
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.files import check_writable, claimed
from uvit_decay.runtime.validation import write_json

COMPARABLE = 10_000  # samples; distances decrease with their number, and published values use 50,000
ROWS, NEAREST = 6, 6  # rows and columns of the memorisation check
FEWEST = 10  # fewest samples and reference images of a class for which coverage is reported


def write_reports(comparison: Comparison, out: Path, save_samples: Path | None, processes: Processes) -> None:
    """Extract all features on these processes; rank 0 computes the metrics, prints them and writes the reports.

    Args:
        comparison: comparison, already checked.
        out: report.json; report.html is written beside it, features of the samples meanwhile.
        save_samples: an .npz for the samples; None keeps none.
        processes: processes that share the work.
    """
    files = [out, out.with_suffix(".html"), *([] if save_samples is None else [save_samples])]
    for file in files:
        check_writable(file)
    with claimed(*files, first=processes.is_main):
        store, reference = comparison.extract(out.with_suffix(".features"), processes, save_samples is not None)
        if not processes.is_main:
            return
        report = build_report(comparison, store, reference)
        content = {
            "metrics": {f"{name}/{comparison.name}": value for name, value in report.metrics.items()},
            "values": report.metrics,
            "coverage": report.coverage,
            "protocol": report.protocol,
            "remarks": report.remarks,
        }
        write_json(out, content)
        write_html(out.with_suffix(".html"), report)
        if save_samples is not None:
            save_npz(save_samples, store.iterate("images"), len(store), comparison.samples.labels)
        store.remove()
    for name, value in report.metrics.items():
        print(f"{on_screen(name, name, report.protocol['extractor'])} {value:.6g}")
    for remark in report.remarks:
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {out.with_suffix('.html').name}")


def build_report(comparison: Comparison, samples: FeatureStore, reference: Reference) -> Report:
    """Return the report of a comparison whose features have been extracted; call it on the first process."""
    images = torch.cat(list(samples.iterate("images")))[:SHOWN]
    names, columns = _columns(comparison.samples)
    return Report(
        title=f"{comparison.samples.name} against {comparison.reference_name}",
        metrics=comparison.measure(samples, reference),
        protocol={**comparison.metadata(), "measured_nfe": samples.nfe},
        remarks=remarks(comparison),
        samples=images[: len(images) // columns * columns or len(images)],
        columns=columns,
        class_names=names,
        neighbours=_neighbours(comparison, images, samples, reference),
        coverage=_coverage(comparison, samples, reference),
    )


def remarks(comparison: Comparison) -> tuple[str, ...]:
    """Return caveats for readers of the numbers, one sentence each."""
    ours, theirs, file = comparison.samples, comparison.reference, comparison.file
    n, d, lines = len(ours), comparison.extractor.widths["features"], []
    if n < COMPARABLE:
        lines.append(f"{n:,} samples, below {COMPARABLE:,}: not comparable with published numbers")
    if comparison.options.allow_few and n <= d:
        lines.append(f"{n:,} samples for {d:,} features: the covariance has not full rank")
    if file is not None and "extractor" not in file.metadata:
        lines.append(f"{file.path.name} does not record by which extractor and resize it was made")
    if theirs is not None and ours.has_jpegs != theirs.has_jpegs:
        jpegs = ours.name if ours.has_jpegs else theirs.name
        lines.append(f"{jpegs} are JPEGs and the other side is not: compression alone moves every metric")
    if theirs is not None and ours.shape != theirs.shape:
        sizes = (f"{images.shape[2]}x{images.shape[1]}" for images in (ours, theirs))
        lines.append(f"samples and reference differ in size, {' and '.join(sizes)}")
    if (remark := comparison.extractor.remark()) is not None:
        lines.append(remark)
    lines += (f"without {name}: {reason}" for name, reason in comparison.left_out.items())
    return tuple(lines)


def _columns(images: ImageSource) -> tuple[tuple[str, ...], int]:
    """Return class names above the columns of the sample grid (empty for none), and the number of columns."""
    # Samples usually take the classes in turn. With ten classes or fewer, a number of columns that is a multiple of
    # theirs puts one class into each column; names are given if the labels do follow that pattern.
    if images.labels is None:
        return (), 10
    count, shown = len(images.class_names), images.labels[:SHOWN]
    columns = grid_columns(count) if 0 < count <= 10 else 10
    if not torch.equal(shown, torch.arange(len(shown)) % columns % max(count, 1)):
        return (), 10
    names = in_words(images.class_names)
    return tuple(names[i % count] for i in range(columns)), columns


def _neighbours(
    comparison: Comparison, shown: Tensor, samples: FeatureStore, reference: Reference
) -> Neighbours | None:
    """Return the shown samples that are nearest to reference images, where copies would appear."""
    if reference.store is None:
        return None
    keys = reference.tensor("features")
    distances, indices = nearest(samples.tensor("features")[: len(shown)], keys, min(NEAREST, len(keys)))
    rows = distances[:, 0].argsort(stable=True)[:ROWS]
    images = torch.stack([comparison.reference.read(row.tolist()).cpu() for row in indices[rows]])
    return Neighbours(shown[rows], images, distances[rows].float())


def _coverage(comparison: Comparison, samples: FeatureStore, reference: Reference) -> dict[str, float] | None:
    """Return, per class, the share of reference images that have a sample of the class in their neighbourhood."""
    ours, theirs = comparison.samples, comparison.reference
    if reference.store is None or ours.class_names != theirs.class_names:
        return None
    real, fake = reference.tensor("features"), samples.tensor("features")
    coverage = {}
    for label, name in enumerate(theirs.class_names):
        pair = real[theirs.labels == label], fake[ours.labels == label]
        if min(map(len, pair)) >= FEWEST:
            coverage[name] = float(covered(*pair).double().mean())
    return coverage or None
