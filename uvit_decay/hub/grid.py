"""A grid of pictures of an exported checkpoint: those that sample.py makes first, with seed 0."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from uvit_decay.checkpoint import Checkpoint
from uvit_decay.image_io import save_image
from uvit_decay.sample_files import LONG, grid
from uvit_decay.samples import Samples
from uvit_decay.sampling_options import SamplingOptions

ROWS, PLAIN, COLUMNS = 4, 16, 10  # rows of pictures by class, pictures of an unconditional network, most classes


def write_grid(target: Path, source: Path, checkpoint: Checkpoint, vae: str | None) -> None:
    """Write pictures of the checkpoint in the file `source` to `target`, a column for each of its first classes."""
    options = SamplingOptions(weights=checkpoint.weights, vae=vae)
    samples = Samples.from_options(source, options)
    samples = replace(samples, classes=samples.classes[:COLUMNS], at_random=False)
    count = ROWS * len(samples.classes) or PLAIN
    size = min(count, options.batch_size)
    seconds = samples.seconds(count, size)
    if seconds > LONG:
        print(f"the grid of {count} pictures takes about {seconds / 60:.0f} min: --no-grid omits it", file=sys.stderr)
    parts = [samples.images(range(count)[start : start + size]).cpu() for start in range(0, count, size)]
    save_image(target, grid(samples, parts))
