"""Files of samples: a grid, an array, or a folder of PNGs, which a later run completes after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from uvit_decay import pictures as image_io
from uvit_decay.data.classes import in_words
from uvit_decay.files.download import checksum
from uvit_decay.files.validation import read_json, write_json
from uvit_decay.files.writing import check_writable, remove_remains
from uvit_decay.generation.options import LARGEST_GRID
from uvit_decay.generation.samples import PATHS, Samples
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.progress import Work, track
from uvit_decay.terminal.typed import Positive, check_types

METADATA = "sampling.json"  # in a folder of samples


def check_output(out: Path, num: int | None) -> None:
    """Raise a UserError if samples cannot be written to `out`.

    Args:
        out: a .png (grid), an .npz (array), or a folder that is new, empty or has samples already.
        num: number of samples; None if it is not known yet.
    """
    form = out.suffix.lower()
    if form not in ("", ".png", ".npz"):
        raise UserError(f"`out` {out}: give a .png (grid), an .npz (array) or a folder without a suffix")
    if form == ".png" and (num or 0) > LARGEST_GRID:
        raise UserError(f"`out` {out}: a grid takes at most {LARGEST_GRID} images; give an .npz or a folder")
    check_writable(out, folder=not form)
    if form or (out / METADATA).exists():
        return
    for path in out.iterdir():
        if not path.name.startswith("."):
            raise UserError(f"`out` {out}: the folder is not empty and has no samples; give a new or an empty folder")


@check_types
def write_samples(samples: Samples, num: Positive, out: Path, batch_size: Positive, processes: Processes) -> None:
    """Generate this rank's share of the samples 0 to num - 1 that `out` lacks; rank 0 gathers and writes all of them.

    Except for a grid, each batch is written as soon as it is complete. Rank 0 must have claimed `out`.
    """
    if processes.size > 1:
        processes.check_same("options of the samples", [num, samples.settings()])
    numbers: Sequence[int] = range(num)
    if not out.suffix:
        absent = find_missing(out, samples, num) if processes.is_main else []
        numbers = processes.broadcast(absent)
    slices = batches(len(numbers), batch_size, processes.size)
    jobs = [numbers[part.start : part.stop] for part in slices]
    parts = processes.map_ordered(jobs, lambda part: samples.images(part).cpu())
    if not processes.is_main:
        for _ in parts:  # yields nothing on this rank, but does its share of the work
            pass
        return
    existing = num - len(numbers)
    title = f"{samples.sampling.name}, {samples.weights} weights"
    with track(title, num, "image", existing) as work:  # closed before an error is printed
        images = _count_images(parts, work)
        if not out.suffix:
            image_io.save_pngs(out, images, numbers)
        elif out.suffix.lower() == ".npz":
            image_io.save_npz(out, images, num, samples.labels(numbers))
        else:
            image_io.save_image(out, grid(samples, images))
    print(_summarise(samples, out, len(numbers), existing))


def _count_images(parts: Iterable[Tensor], work: Work) -> Iterator[Tensor]:
    """Yield the same batches, and count their images as done."""
    for part in parts:
        yield part
        work.update(len(part))


def _summarise(samples: Samples, out: Path, written: int, existing: int) -> str:
    """Return one line about the images that were written, the images that existed, and the networks."""
    line = f"wrote {out}: {written} images"
    if existing:
        line += f", {existing} were there"
    line += f", step {samples.checkpoint.card.step} of {samples.file}"
    if samples.guide is not None:
        line += f", guided by step {samples.guide.checkpoint.card.step} of {samples.guide.file}"
    return line


def grid(samples: Samples, batches: Iterable[Tensor]) -> Image:
    """Return a grid of the first samples, given in batches; if classes are taken in turn, each class has a column."""
    images = torch.cat(list(batches))
    columns = min(image_io.grid_columns(len(samples.classes)), len(images))
    names: list[str] = []
    if samples.classes and not samples.at_random:
        words = in_words(samples.checkpoint.card.class_names)
        names = [words[label] for label in samples.labels(range(columns))]
    return image_io.labelled_grid(images, columns, names)


def find_missing(folder: Path, samples: Samples, num: int) -> list[int]:
    """Start or continue a claimed folder of samples 0 to num - 1, and return the indices that are missing.

    A folder with samples of other settings, or with more than `num`, is refused.
    """
    checksums = {"sha256": checksum(samples.file)}
    if samples.guide is not None:
        checksums["guide_sha256"] = checksum(samples.guide.file)
    metadata = json.loads(json.dumps({**checksums, **samples.metadata()}))
    if (folder / METADATA).exists():
        _check_continues(folder, metadata)
        remove_remains(folder)
    else:
        remove_remains(folder, METADATA)
        write_json(folder / METADATA, metadata)
    names = [image_io.png_name(i) for i in range(num)]
    existing = {path.name for path in folder.glob("*.png")}
    more = existing.difference(names)
    if more:
        raise UserError(
            f"`out` {folder}: the folder has images beyond `num` {num}, such as {min(more)}; choose another folder"
        )
    missing = []
    for i, name in enumerate(names):
        if name not in existing or not image_io.is_png(folder / name):
            missing.append(i)
    return missing


def _check_continues(folder: Path, metadata: dict[str, Any]) -> None:
    """Raise a UserError, with both values, if a folder has samples of other settings; paths may differ."""
    stored = read_json(folder / METADATA, dict[str, object])
    for key in (*metadata, *stored):
        if key in PATHS:
            continue
        ours, theirs = metadata.get(key), stored.get(key)
        if ours != theirs:
            raise UserError(f"`out` {folder}: its images have {key} {theirs}, not {ours}; choose another folder")
