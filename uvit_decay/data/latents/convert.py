"""Conversion of latents of other projects into shards: mean and variance, or samples, stay as they are."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from uvit_decay.data.classes import class_hash, ordered_class_list
from uvit_decay.data.latents.foreign import ForeignLatents
from uvit_decay.data.latents.manifest import Manifest, Sums, false_colours, read, statistics
from uvit_decay.data.latents.shards import Shard, check_shard, check_space, read_sums, write_labels, write_shard
from uvit_decay.images.autoencoder import LatentSpace
from uvit_decay.images.autoencoder_files import absolute_name
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, claim_paths, remove_remains
from uvit_decay.runtime.progress import track
from uvit_decay.runtime.tensor_files import load_tensors


def describe(
    source: Path,
    latents: ForeignLatents,
    vae: str | None = None,
    scale: float | None = None,
    image_size: int | None = None,
    classes: str | None = None,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    shard_size: int = 1024,
) -> Manifest:
    """Return the manifest of latents of another project before they are converted.

    Args:
        source: their folder or zip.
        latents: the latents.
        vae: the autoencoder that encoded them; None takes the project's.
        scale: factor that normalises them; None takes the project's normalisation.
        image_size: pixels of the encoded images; None takes what the files tell.
        classes: class list that names the labels; None names them by their numbers.
        dtype: of what is stored.
        shard_size: images in a file.

    Raises:
        UserError: the size of the images is not known or does not fit, the autoencoder is neither a folder nor a hub
            id, or the class list has another length.
    """
    size = image_size or latents.image_size
    if size is None:
        raise UserError(f"{source}: its files do not tell the size of the encoded images: give --image-size")
    if size % latents.side:
        raise UserError(f"--image-size {size} is not a multiple of {latents.side}, the cells of its latents")
    name = absolute_name(vae) if vae else latents.vae
    factor = size // latents.side
    fields = latents.normalisation(scale)
    space = LatentSpace(name, sha256="", channels=latents.channels, factor=factor, **fields)
    counts = _count_classes(source, latents.labels, classes)
    names = "\n".join(latents.names).encode(errors="surrogateescape")
    return Manifest(
        latents=space,
        source=str(source),
        pictures=hashlib.sha256(names).hexdigest(),
        count=len(latents.names),
        image_size=size,
        classes=counts,
        class_list=classes,
        class_hash=class_hash(tuple(counts)),
        dtype=dtype,
        precision="float32",
        batch_size=1,
        shard_size=shard_size,
        mirrored=latents.mirrored,
        posterior=latents.posterior,
    )


def _count_classes(source: Path, labels: Tensor | None, classes: str | None) -> dict[str, int]:
    """Return the number of images of each class by name, in the order of the labels; empty without classes."""
    if labels is None:
        if classes is not None:
            raise UserError(f"{source} has no labels: leave out --classes")
        return {}
    count = int(labels.max()) + 1
    names = [str(label) for label in range(count)]
    if classes is not None:
        names = list(ordered_class_list(classes))
        if len(names) < count:
            raise UserError(f"{source} has labels up to {count - 1}, --classes {classes} names {len(names)} classes")
    return dict(zip(names, labels.bincount(minlength=len(names)).tolist(), strict=True))


def convert(latents: ForeignLatents, manifest: Manifest, folder: Path) -> Manifest:
    """Write the shards that are missing from `folder`; return the finished manifest.

    Existing shards are compared with their checksums and with the first row of the source.

    Raises:
        UserError: `folder` is below the source or has latents of other files or settings, the disk is too small, or a
            row is not finite.
    """
    if folder.resolve().is_relative_to(Path(manifest.source).resolve()):
        raise UserError(
            f"cannot store latents in {folder}: it is the folder that is read, or in it; choose another one"
        )
    check_writable(folder, folder=True)
    labels = latents.labels
    if labels is None:
        labels = torch.zeros(manifest.count, dtype=torch.int64)
    with claim_paths(folder):
        remove_remains(folder)
        manifest.check_continues(folder)
        missing = _find_missing(latents, manifest, folder, labels)
        check_space(folder, manifest, len(missing))
        if missing:
            manifest.write(folder)
        with track("converting", len(missing), "shard") as work:
            for number in missing:
                rows = manifest.shards[number].images
                shard = _convert_shard(latents, manifest, rows, labels)
                write_shard(folder, manifest, number, shard)
                work.update()
        write_labels(folder, labels)
        sums = list(read_sums(folder, manifest))
        numbers, _ = statistics(sums)
        space = replace(manifest.latents, rgb=false_colours(sums))
        # Written last: statistics mark the latents as complete.
        replace(manifest, latents=space, statistics=numbers).write(folder)
    return read(folder)


def _find_missing(latents: ForeignLatents, manifest: Manifest, folder: Path, labels: Tensor) -> list[int]:
    """Return the numbers of the shards to write; damaged ones are among them, with a remark.

    Raises:
        UserError: the first row of an existing shard is not the row of the source.
    """
    missing = []
    for number, (name, rows) in enumerate(manifest.shards):
        path = folder / name
        if not path.exists():
            missing.append(number)
            continue
        try:
            check_shard(folder, manifest, number, labels[rows.start : rows.stop])
        except UserError as error:
            print(f"{error}; it is converted again", file=sys.stderr)
            missing.append(number)
            continue
        _, tensors = load_tensors(path, verify=False)
        first = latents.read(rows[:1]).to(tensors["moments"].dtype)
        if not torch.equal(tensors["moments"][:1], first):
            raise UserError(f"{path} holds other latents than {manifest.source}; choose another folder")
    return missing


def _convert_shard(latents: ForeignLatents, manifest: Manifest, rows: range, labels: Tensor) -> Shard:
    """Return a shard of these rows; raise a UserError if they are not finite in its dtype."""
    given = latents.read(rows)
    moments = given.to(getattr(torch, manifest.dtype))
    if not moments.isfinite().all():
        which = f"latents {rows.start} to {rows.stop - 1} of {manifest.source}"
        raise UserError(
            f"{which} are not finite in {manifest.dtype}; fetch damaged files again, or try --dtype float32"
        )
    sums = Sums(manifest.latents)
    sums.update(moments[:, 0].float())
    return Shard(moments, labels[rows.start : rows.stop].clone(), None, sums)
