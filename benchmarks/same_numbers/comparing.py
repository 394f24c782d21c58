"""How the files of a row are compared."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.same_numbers.rows import RESUMED, Row

# Parts of names of values that another machine, day or path changes.
UNCOMPARED = (
    "second",
    "time",
    "hour",
    "date",
    "host",
    "path",
    "file",
    "version",
    "memory",
    "throughput",
    "mfu",
    "hash",
)
# Names of values that ac8466d5 writes and later versions do not, on purpose: CHANGELOG.md says so.
GONE = ("knn_without_pcs_accuracy", "pcs_removed")
DESCRIPTIONS = ("settings", "uvit_decay", "loops", "metadata", "protocol")  # options and counters beside the results
HEADING = 22  # rows of pixels of the headings of a picture, whose words may change


@dataclass
class Comparison:
    """What was compared for a line of the table, and the differences."""

    values: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether values were compared and none differs."""
        return self.values > 0 and not self.differences


def compare_row(row: Row, out: Path) -> dict[str, Comparison]:
    """Compare the files of a row; return what was found for each line of the table."""
    old, new = out / "old", out / "new" / (RESUMED if row.resumed else "")
    whole = Comparison()
    found = {row.name: whole}
    if row.apart:
        found = {pattern: Comparison() for pattern in row.files}
    for pattern in row.files:
        comparison = found.get(pattern, whole)
        names = {str(path.relative_to(side)) for side in (old, new) for path in side.glob(pattern)}
        if not names:
            comparison.differences.append(f"{pattern}: neither side has written such a file")
        for name in sorted(names):
            compare_files(old / name, new / name, name, comparison, row.tolerance)
    for before, after in row.renamed.items():
        compare_files(old / before, new / after, after, whole)
    return found


def compare_files(old: Path, new: Path, name: str, comparison: Comparison, tolerance: float = 0.0) -> None:
    """Add the differences of a file that both sides have written."""
    missing = [str(path) for path in (old, new) if not path.exists()]
    if missing:
        comparison.differences.append(f"{name}: {missing[0]} is missing")
        return
    before, after = dict(read_values(old)), dict(read_values(new))
    for key in list(before):
        if key not in after and key.endswith(GONE):
            del before[key]
    for key in before.keys() | after.keys():
        if key not in before or key not in after:
            comparison.differences.append(f"{name}: {key} only in {'old' if key in before else 'new'}")
        elif difference := find_difference(before[key], after[key], tolerance):
            comparison.differences.append(f"{name}: {key}: {difference}")
    comparison.values += sum(np.size(value) for value in before.values())
    comparison.differences.sort()


def read_values(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and values of all tensors, pixels or numbers of a file."""
    if path.suffix == ".png":
        yield "pixels", np.asarray(Image.open(path))[HEADING:]
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            yield from ((name, arrays[name]) for name in arrays.files if arrays[name].dtype.kind in "biuf")
    elif path.suffix == ".ckpt":
        yield from flatten(torch.load(path, map_location="cpu", weights_only=True))
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        yield from flatten(load_file(path))
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            yield from flatten([dict(line) for line in csv.DictReader(file)])
    elif path.suffix == ".jsonl":
        yield from flatten([json.loads(line) for line in path.read_text().splitlines()])
    else:
        yield from flatten(json.loads(path.read_text()))


def flatten(tree: object, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors and numbers of nested mappings and sequences, without those that a machine or a day changes."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            word = str(key).lower()
            described = word in DESCRIPTIONS or any(part in word for part in UNCOMPARED)
            if isinstance(value, torch.Tensor) or not described:
                yield from flatten(value, f"{name}.{key}".lstrip("."))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from flatten(value, f"{name}[{i}]")
    elif isinstance(tree, torch.Tensor):
        yield name, to_bits(tree)
    elif (number := to_number(tree)) is not None:
        yield name, np.asarray(number)


def to_bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; bfloat16, which numpy lacks, as float32, which has each of its values."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_number(value: object) -> float | None:
    """Return a value of a table or of JSON as a number, None if it is none."""
    if isinstance(value, bool | int | float):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def find_difference(old: np.ndarray, new: np.ndarray, tolerance: float) -> str | None:
    """Return how two arrays differ, None if they have the same shape, type and values; NaN equals NaN.

    With a `tolerance`, values may differ by this share of the largest value.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{old.dtype}{list(old.shape)} and {new.dtype}{list(new.shape)}"
    if np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
        return None
    distance = np.abs(old.astype(np.float64) - new.astype(np.float64))
    largest = np.nanmax(distance) if np.isfinite(distance).any() else math.nan
    if tolerance and largest <= tolerance * np.abs(old).max():
        return None
    if old.size == 1:
        return f"{old.item()} and {new.item()}"
    return f"{np.count_nonzero(old != new)} of {old.size} values, by {largest:.3g} at most"
