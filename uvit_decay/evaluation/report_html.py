"""Report as one self-contained HTML file with embedded images, from the template report.html.j2."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from uvit_decay.data.classes import in_words, synonyms
from uvit_decay.evaluation.metric_table import (
    CLASSIFIER_ACCURACY,
    CONSISTENCY,
    OF_CLASSIFIER,
    OF_LABELS,
    collect_values,
    format_title,
)
from uvit_decay.files.validation import flat
from uvit_decay.files.writing import replacing
from uvit_decay.pictures import labelled_grid, to_pil

ALL_CLASSES = 100  # largest number of classes that are all shown
EXTREMES = 20  # number of worst, and of best, classes that are shown if there are more
THUMBNAIL = 128  # pixels; larger neighbours are shrunk to this size
PIXELATED = 64  # pixels; smaller neighbours are enlarged without smoothing


@dataclass(frozen=True)
class Neighbours:
    """Samples and, for each, the k nearest reference images, nearest first, with their distances in feature space."""

    samples: UInt8[Tensor, "q c h w"]
    nearest: UInt8[Tensor, "q k c h w"]
    distances: Float[Tensor, "q k"]


@dataclass(frozen=True)
class Ceiling:
    """Values of real images, such as the test set, against the same reference: what samples can reach at best.

    Args:
        name: names and numbers of the images and of the reference, and the extractor.
        values: values by name; metrics for which there are too few images are missing.
    """

    name: str
    values: dict[str, float]


NO_CEILING = Ceiling("", {})


@dataclass(frozen=True)
class Report:
    """Contents of a report.

    Args:
        title: heading.
        metrics: values by the names in METRICS; other names are shown as they are. `x_std` is the spread of `x`.
        protocol: settings of the measurement, plain values by name.
        remarks: caveats for readers who compare the values, one sentence each.
        samples: images of the sample grid, row by row.
        columns: number of columns of the grid.
        class_names: titles of the columns; may be empty.
        neighbours: images of the memorisation check; None leaves it out.
        coverage: covered share of the reference images, in [0, 1], by class name; None leaves it out. The page shows
            the names in words.
        ceiling: values of real images, shown beside the samples' values.
    """

    title: str
    metrics: dict[str, float]
    protocol: dict[str, Any]
    remarks: tuple[str, ...]
    samples: UInt8[Tensor, "m c h w"]
    columns: int
    class_names: tuple[str, ...]
    neighbours: Neighbours | None
    coverage: dict[str, float] | None
    ceiling: Ceiling = NO_CEILING


def write_html(path: Path, report: Report) -> None:
    """Write the report as one file that needs no others; it replaces `path` when it is complete."""
    text = files("uvit_decay.evaluation").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(text).render(
        title=report.title,
        metrics=_build_metric_rows(report.metrics, str(report.protocol.get("extractor")), report.ceiling.values),
        ceiling=report.ceiling.name,
        remarks=report.remarks,
        grid=_encode_image(labelled_grid(report.samples, report.columns, report.class_names)),
        sample_count=len(report.samples),
        neighbours=_build_neighbour_rows(report.neighbours) if report.neighbours else None,
        pixelated=report.samples.shape[-1] < PIXELATED,
        coverage=_build_coverage_bars(report.coverage) if report.coverage else None,
        protocol={name: _format_setting(value) for name, value in flat(report.protocol)},
    )
    with replacing(path) as file:
        file.write(page.encode(errors="backslashreplace"))  # the name of a folder may be invalid UTF-8


def _build_metric_rows(metrics: dict[str, float], extractor: str, ceiling: dict[str, float]) -> list[dict[str, str]]:
    """Return the table of values; a value and its spread share a row.

    Args:
        metrics: the values by name.
        extractor: fingerprint of the extractor.
        ceiling: values of real images by name; empty for none.
    """
    displays = {**collect_values(), CONSISTENCY: OF_LABELS, CLASSIFIER_ACCURACY: OF_CLASSIFIER}
    rows = []
    for key, value in metrics.items():
        if key.endswith("_std") and key.removesuffix("_std") in metrics:
            continue
        display = displays.get(key)
        digits = f".{display.decimals}f" if display else ".4g"
        shown = f"{value:{digits}}"
        if (spread := metrics.get(f"{key}_std")) is not None:
            shown += f" ± {spread:{digits}}"
        row = {"name": key, "value": shown.replace("-", "\N{MINUS SIGN}"), "better": "", "phrase": "", "real": ""}
        if key in ceiling:
            row["real"] = f"{ceiling[key]:{digits}}".replace("-", "\N{MINUS SIGN}")
        if display is not None:
            row |= {"name": display.title, "better": display.better, "phrase": display.meaning}
        row["name"] = format_title(key, row["name"], extractor)
        rows.append(row)
    return rows


def _encode_image(image: Image.Image) -> str:
    """Return an image as the data URI of a PNG."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    encoded = base64.b64encode(file.getvalue()).decode()
    return f"data:image/png;base64,{encoded}"


def _encode_thumbnail(image: Tensor) -> str:
    """Return an image of at most THUMBNAIL pixels as a data URI."""
    small = to_pil(image)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return _encode_image(small)


def _build_neighbour_rows(neighbours: Neighbours) -> list[dict[str, Any]]:
    """Return samples and their neighbours as data URIs."""
    rows = []
    for k, sample in enumerate(neighbours.samples):
        images = []
        for image, distance in zip(neighbours.nearest[k], neighbours.distances[k].tolist(), strict=True):
            images.append({"image": _encode_thumbnail(image), "distance": f"{distance:.3g}"})
        rows.append({"sample": _encode_thumbnail(sample), "nearest": images})
    return rows


def _build_coverage_bars(coverage: dict[str, float]) -> dict[str, Any]:
    """Return bars of all classes, least covered first; if there are many classes, bars of both ends."""
    names = sorted(coverage, key=lambda name: coverage[name])
    bars = []
    for name, word in zip(names, in_words(names), strict=True):
        title = ", ".join(dict.fromkeys((name, *synonyms(name))))
        bars.append({"name": word, "title": title, "percent": f"{100 * coverage[name]:.1f}"})
    parts = [("Least covered first", bars)]
    if len(bars) > ALL_CLASSES:
        parts = [
            (f"The {EXTREMES} least covered", bars[:EXTREMES]),
            (f"The {EXTREMES} best covered", bars[: -EXTREMES - 1 : -1]),
        ]
    mean = 100 * sum(coverage.values()) / len(coverage)
    return {"mean": f"{mean:.1f}", "count": len(bars), "parts": parts}


def _format_setting(value: Any) -> str:
    """Return a setting of the protocol as text, floats with six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format_setting(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_setting, value))
    return str(value)
