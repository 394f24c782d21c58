"""Files of the mixing matrix of a network that trains: mixing/step_N.csv and mixing.png in the run folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from uvit_decay.decay import Merge
from uvit_decay.plots import heat_maps
from uvit_decay.runtime.files import replacing

FOLDER = "mixing"
FIGURE = "mixing.png"


def save_mixing(
    folder: Path, step: int, matrix: Float[Tensor, "rows sources"], branches: Sequence[str], merges: Sequence[Merge]
) -> Path:
    """Write mixing/step_N.csv, a row for each reader and a column for each source, and return its path.

    Args:
        folder: run folder.
        step: number of optimizer steps.
        matrix: see `uvit_decay.decay.mixing_matrix`.
        branches: names of the branches, which are readers and sources.
        merges: merges of long skips, which are the last sources.
    """
    path = folder / FOLDER / f"step_{step:08d}.csv"
    path.parent.mkdir(exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text)
    header = ["reader", "embeddings", *branches]
    for merge in merges:
        header.append(f"merge before {branches[merge.branch]}")
    writer.writerow(header)
    for reader, row in zip([*branches, "output"], matrix.tolist(), strict=True):
        writer.writerow([reader, *row])
    with replacing(path) as file:
        file.write(text.getvalue().encode())
    return path


def draw_mixing(folder: Path, step: int, matrix: Float[Tensor, "rows sources"]) -> Path:
    """Draw mixing.png, a heat map of the matrix of a step, and return its path."""
    path = folder / FIGURE
    rows, sources = matrix.shape
    heat_maps(path, {f"mixing matrix, step {step}": matrix}, range(sources), ("source", f"reader (of {rows})"))
    return path
