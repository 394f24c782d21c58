"""Files of samples: a grid, an array, or a folder of PNGs, which an interrupted program can complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor
from tqdm import tqdm

from uvit_decay import image_io
from uvit_decay.class_names import in_words
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.download import checksum
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, remove_remains
from uvit_decay.runtime.validation import read_json, write_json
from uvit_decay.samples import PATHS, Samples
from uvit_decay.sampling_options import LARGEST_GRID

METADATA = "sampling.json"  # in a folder of samples


def check_output(out: Path, num: int | None) -> None:
    """Raise a UserError if `out` is no name for samples, or cannot be written; `num` is their number, if it is known.

    A folder must be empty, or have samples already.
    """
    form = out.suffix.lower()
    if form not in ("", ".png", ".npz"):
        raise UserError(f"--out {out}: a .png (grid), an .npz (array) or a folder without a suffix")
    if form == ".png" and (num or 0) > LARGEST_GRID:
        raise UserError(f"--out {out}: a grid takes at most {LARGEST_GRID} images; name an .npz or a folder")
    check_writable(out, folder=not form)
    if not form and not (out / METADATA).exists() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise UserError(f"--out {out}: the folder is not empty, and its files would be mixed with the new ones")


def write_samples(samples: Samples, num: int, out: Path, batch_size: int, processes: Processes) -> None:
    """Generate this rank's share of the samples 0 to num - 1 that `out` lacks; rank 0 gathers and writes all of them.

    Batches are written as they come, except those of a grid. Rank 0 must have claimed `out`.
    """
    if processes.size > 1:
        about = samples.metadata()
        about = {key: value for key, value in about.items() if key not in PATHS}
        processes.check_same("options of the samples", [num, about])
    numbers: Sequence[int] = range(num)
    if not out.suffix:
        numbers = processes.broadcast(missing(out, samples, num) if processes.is_main else [])
    jobs = [numbers[part.start : part.stop] for part in batches(len(numbers), batch_size, processes.size)]
    parts = processes.map_ordered(jobs, lambda part: samples.images(part).cpu())
    if not processes.is_main:
        list(parts)  # yields nothing on this rank, but does its share of the work
        return
    title = f"{samples.sampling.name}, {samples.weights} weights"
    with tqdm(total=num, initial=num - len(numbers), unit="image", desc=title) as bar:  # closed before an error is said
        images = _counted(parts, bar)
        if not out.suffix:
            image_io.save_pngs(out, images, numbers)
        elif out.suffix.lower() == ".npz":
            image_io.save_npz(out, images, len(numbers), samples.labels(numbers))
        else:
            image_io.save_image(out, grid(samples, images))
    existing = "" if len(numbers) == num else f", {num - len(numbers)} were there"
    made_by = f"step {samples.checkpoint.card.step} of {samples.file}"
    if samples.guide is not None:
        made_by += f", guided by step {samples.guide.checkpoint.card.step} of {samples.guide.file}"
    print(f"wrote {out}: {len(numbers)} images{existing}, {made_by}")


def _counted(parts: Iterable[Tensor], bar: tqdm) -> Iterator[Tensor]:
    """Yield the same batches, and count their images in a progress bar."""
    for part in parts:
        yield part
        bar.update(len(part))


def grid(samples: Samples, batches: Iterable[Tensor]) -> Image:
    """Return a picture of samples, given in batches from the first one on; classes in turn have a column each."""
    images = torch.cat(list(batches))
    columns = min(image_io.grid_columns(len(samples.classes)), len(images))
    labels = [] if samples.at_random else samples.labels(range(columns)) or []
    words = in_words(samples.checkpoint.card.class_names) if labels else ()
    return image_io.labelled_grid(images, columns, [words[label] for label in labels])


def missing(folder: Path, samples: Samples, num: int) -> list[int]:
    """Start or continue a claimed folder of samples 0 to num - 1, and return the indices that are missing."""
    checksums = {"sha256": checksum(samples.file)}
    if samples.guide is not None:
        checksums["guide_sha256"] = checksum(samples.guide.file)
    metadata = json.loads(json.dumps({**checksums, **samples.metadata()}))
    if (folder / METADATA).exists():
        stored = read_json(folder / METADATA, dict[str, object])
        for key in (*metadata, *stored):
            ours, theirs = metadata.get(key), stored.get(key)
            if ours != theirs and key not in PATHS:
                raise UserError(f"--out {folder}: its images have {key} {theirs}, not {ours}: choose another folder")
        remove_remains(folder)
    else:
        remove_remains(folder, METADATA)
        write_json(folder / METADATA, metadata)
    existing = {path.name for path in folder.glob("*.png")}
    names = [image_io.png_name(i) for i in range(num)]
    if more := existing.difference(names):
        raise UserError(f"--out {folder}: it has images beyond --num {num}, such as {min(more)}: choose another folder")
    return [i for i, name in enumerate(names) if not (name in existing and image_io.is_png(folder / name))]
