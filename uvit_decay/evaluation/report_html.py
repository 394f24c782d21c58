"""The report as one self-contained HTML file with embedded images, from the template report.html.j2."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from uvit_decay.class_names import in_words, synonyms
from uvit_decay.evaluation.metric_table import displayed, on_screen
from uvit_decay.image_io import labelled_grid, to_pil
from uvit_decay.runtime.files import replacing

ALL_CLASSES = 100  # most classes that have a bar each
EXTREMES = 20  # number of worst, and of best, if there are more classes
THUMBNAIL = 128  # pixels; larger neighbours are shrunk to this size
PIXELATED = 64  # pixels; smaller neighbours are enlarged without smoothing


@dataclass(frozen=True)
class Neighbours:
    """Samples and, for each, the k nearest reference images, nearest first, with their distances in feature space."""

    samples: UInt8[Tensor, "q c h w"]
    nearest: UInt8[Tensor, "q k c h w"]
    distances: Float[Tensor, "q k"]


@dataclass(frozen=True)
class Report:
    """Contents of a report.

    Args:
        title: heading.
        metrics: values by the names in METRICS; other names are shown as they are. `x_std` is the spread of `x`.
        protocol: settings of the measurement, plain values by name.
        remarks: caveats for readers who compare the numbers, one sentence each.
        samples: images of the sample grid, row by row.
        columns: number of columns of the grid.
        class_names: titles of the columns; may be empty.
        neighbours: images of the memorisation check; None leaves it out.
        coverage: class name -> share in [0, 1] of its reference images that are covered; None leaves it out. The page
            shows names in words.
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


def write_html(path: Path, report: Report) -> None:
    """Write the report as one file that needs no others; it replaces `path` when it is complete."""
    text = files("uvit_decay.evaluation").joinpath("report.html.j2").read_text(encoding="utf-8")
    strict = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    page = (
        jinja2.Environment(**strict, trim_blocks=True, lstrip_blocks=True)
        .from_string(text)
        .render(
            title=report.title,
            metrics=list(_metric_rows(report.metrics, str(report.protocol.get("extractor")))),
            remarks=report.remarks,
            grid=_data_uri(labelled_grid(report.samples, report.columns, report.class_names)),
            sample_count=len(report.samples),
            neighbours=_neighbour_rows(report.neighbours) if report.neighbours else None,
            pixelated=report.samples.shape[-1] < PIXELATED,
            coverage=_coverage_bars(report.coverage) if report.coverage else None,
            protocol={name: _plain(value) for name, value in report.protocol.items()},
        )
    )
    with replacing(path) as file:
        file.write(page.encode(errors="backslashreplace"))  # a folder's name may be no UTF-8


def _metric_rows(metrics: dict[str, float], extractor: str) -> Iterator[dict[str, str]]:
    for key, value in metrics.items():
        if key.endswith("_std") and key.removesuffix("_std") in metrics:
            continue
        display = displayed().get(key)
        digits = f".{display.decimals}f" if display else ".4g"
        shown = f"{value:{digits}}"
        if (spread := metrics.get(f"{key}_std")) is not None:
            shown += f" ± {spread:{digits}}"
        title, _, better, phrase = display or (key, None, "", "")
        value = shown.replace("-", "\N{MINUS SIGN}")
        yield {"name": on_screen(key, title, extractor), "value": value, "better": better, "phrase": phrase}


def _data_uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _thumbnail(image: Tensor) -> str:
    small = to_pil(image)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return _data_uri(small)


def _neighbour_rows(neighbours: Neighbours) -> list[dict[str, Any]]:
    """Return samples and their neighbours as data URIs."""
    rows, fields = [], (neighbours.samples, neighbours.nearest, neighbours.distances)
    for sample, nearest, distances in zip(*fields, strict=True):
        pairs = zip(nearest, distances.tolist(), strict=True)
        images = [{"image": _thumbnail(image), "distance": f"{distance:.3g}"} for image, distance in pairs]
        rows.append({"sample": _thumbnail(sample), "nearest": images})
    return rows


def _coverage_bars(coverage: dict[str, float]) -> dict[str, Any]:
    """Return bars of all classes, least covered first; of many, both ends."""
    ranked = sorted(coverage.items(), key=lambda item: item[1])
    words = in_words([name for name, _ in ranked])
    bars = [
        {"name": word, "title": ", ".join(dict.fromkeys((name, *synonyms(name)))), "percent": f"{100 * share:.1f}"}
        for word, (name, share) in zip(words, ranked, strict=True)
    ]
    parts = [("Least covered first", bars)]
    if len(bars) > ALL_CLASSES:
        parts = [(f"The {EXTREMES} least covered", bars[:EXTREMES])]
        parts.append((f"The {EXTREMES} best covered", bars[: -EXTREMES - 1 : -1]))
    return {"mean": f"{100 * sum(coverage.values()) / len(coverage):.1f}", "count": len(bars), "parts": parts}


def _plain(value: Any) -> str:
    """Format a protocol value for display."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return str(value)
