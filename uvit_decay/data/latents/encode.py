"""Encode images to latents once: on any number of processes and devices, resumable, with reproducible bytes.

A shard is the unit of work: one process encodes it, in batches that never cross its borders, and writes it atomically.
An interrupted run therefore continues with the missing shards, and these have the same bytes as those of an
uninterrupted run on the same kind of device, with the same versions and, on CPUs, the same number of threads. Those of
older versions differ by rounding: about 1e-6 of the moments in float32, 1 % in bfloat16, as far as either is off.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from uvit_decay.autoencoder import Autoencoder, LatentSpace
from uvit_decay.class_names import class_hash
from uvit_decay.data.folder import OnDisk
from uvit_decay.data.image_files import Listing
from uvit_decay.data.latents.manifest import Manifest, Sums, read, statistics
from uvit_decay.data.latents.shards import check_shard, crc32, read_sums, write_labels, write_shard
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, claimed, remove_remains
from uvit_decay.runtime.random import subset

AT_ONCE = 256  # images to read for a comparison


def describe(listing: Listing, space: LatentSpace, image_size: int, **settings: Any) -> Manifest:
    """Return the manifest of these images before any is encoded; `settings` are its other fields, see there."""
    if image_size < 1 or image_size % space.factor:
        raise UserError(f"--image-size {image_size} is not a multiple of {space.factor}, the autoencoder's factor")
    counts = torch.tensor(listing.labels).bincount(minlength=len(listing.class_names)).tolist()
    return Manifest(
        latents=space,
        source=str(listing.path),
        pictures=hashlib.sha256("\n".join(listing.members).encode(errors="surrogateescape")).hexdigest(),
        count=len(listing.members),
        classes=dict(zip(listing.class_names, counts, strict=False)),  # without classes: one count, no name
        class_hash=class_hash(listing.class_names),
        image_size=image_size,
        **settings,
    )


def encode(
    listing: Listing, manifest: Manifest, autoencoder: Autoencoder, folder: Path, workers: int, processes: Processes
) -> Manifest:
    """Encode the shards missing from `folder`, divided over all processes; return the finished manifest.

    Existing shards are read and compared with their checksums; damaged ones are encoded again. A folder with latents of
    other images or settings is refused.
    """
    if folder.resolve().is_relative_to(listing.path.resolve()):
        raise UserError(f"{folder} is the images' own folder, or in it: choose another one for the latents")
    check_writable(folder, folder=True)
    processes.check_shared(folder)
    images = OnDisk(listing, list(range(manifest.count)), manifest.image_size, channels=3)
    if processes.size > 1:
        few = crc32(images[subset(images, COMPARED, "compared")][0], 1).tolist()
        processes.check_same(f"settings or images of {listing.path}", [manifest.fingerprint, few])
    with claimed(folder, first=processes.is_main):
        if processes.is_main:
            remove_remains(folder)  # before any process of this program writes
        missing = _missing(images, manifest, folder, processes)
        if processes.is_main and missing:
            manifest.write(folder)
        mine = missing[processes.rank :: processes.size]
        _encode_shards(images, manifest, autoencoder, folder, mine, workers, processes)
        processes.wait()
        if processes.is_main:
            write_labels(folder, images.labels)
            numbers, rgb = statistics(list(read_sums(folder, manifest)))
            # written last: statistics mark the latents as complete
            replace(manifest, latents=replace(manifest.latents, rgb=rgb), statistics=numbers).write(folder)
        processes.wait()
    return read(folder)


def _missing(images: OnDisk, manifest: Manifest, folder: Path, processes: Processes) -> list[int]:
    """Return the shards to encode; each process first verifies its share of the existing ones, then their images."""
    manifest.check_continues(folder)
    shards = range(len(manifest.shards))
    checksums = _verified(images, manifest, folder, shards[processes.rank :: processes.size])
    processes.wait()
    missing = [k for k in shards if not (folder / manifest.shards[k][0]).exists()]
    missing = processes.broadcast(missing)  # other processes may list them later, when this one has written some
    row_bytes = 2 * math.prod(manifest.row)
    needed, free = len(missing) * min(manifest.shard_size, manifest.count) * row_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"{folder}: the latents need {needed / 2**30:.1f} GiB, the disk has {free / 2**30:.1f}")
    _check_images(images, manifest, folder, checksums, 1 if not missing else manifest.shard_size)
    return missing


def _verified(images: OnDisk, manifest: Manifest, folder: Path, numbers: range) -> dict[int, Tensor]:
    """Remove the damaged ones of these shards, with a remark; return the checksums of the others' images."""
    checksums = {}
    for number in numbers:
        name, part = manifest.shards[number]
        if not (folder / name).exists():
            continue
        if (folder / name).is_dir():
            raise UserError(f"{folder / name} is a folder at the name of a shard: remove it")
        try:
            pixels = check_shard(folder, manifest, number, images.labels[part.start : part.stop])
        except UserError as error:
            print(f"{error}: it is made anew", file=sys.stderr)
            (folder / name).unlink()
            continue
        if pixels is not None:
            checksums[number] = pixels
    return checksums


def _check_images(images: OnDisk, manifest: Manifest, folder: Path, checksums: dict[int, Tensor], most: int) -> None:
    """Raise a UserError if an image, of at most so many of each shard, is not the one that was encoded.

    All are compared if shards are to be added: these must not mix with shards of what the images once were. It takes as
    long as decoding them. Otherwise the first ones tell other images of the same names.
    """
    shown = most > 1 and len(checksums) > 0
    for number, pixels in tqdm(checksums.items(), "comparing shards with their images", disable=not shown):
        name, part = manifest.shards[number]
        for start in range(0, min(most, len(part)), AT_ONCE):
            some = part[start : min(start + AT_ONCE, most)]
            same = crc32(images[list(some)][0], 1) == pixels[start : start + len(some)]
            if not same.all():
                image = f"{images.listing.path}: {images.listing.members[some[int(same.int().argmin())]]}"
                raise UserError(f"{image} is another image than {folder / name} was made of: choose another folder")


def _encode_shards(
    images: OnDisk,
    manifest: Manifest,
    autoencoder: Autoencoder,
    folder: Path,
    numbers: list[int],
    workers: int,
    processes: Processes,
) -> None:
    """Encode and write these shards; one reader serves all, so that the next images are decoded meanwhile."""
    parts = [manifest.shards[k][1] for k in numbers]
    step = manifest.batch_size
    batches = [list(part[start : start + step]) for part in parts for start in range(0, len(part), step)]
    stream = iter(DataLoader(images, sampler=batches, batch_size=None, num_workers=workers))
    total = sum(map(len, batches))
    with tqdm(total=total, unit="image", desc="encoding", disable=not processes.is_main) as bar:
        for number, part in zip(numbers, parts, strict=True):
            shard_batches = islice(stream, -(-len(part) // step))
            write_shard(folder, manifest, number, *_encode_shard(shard_batches, part, manifest, autoencoder, bar))


def _encode_shard(
    batches: Iterator[tuple[Tensor, Tensor]], numbers: range, manifest: Manifest, autoencoder: Autoencoder, bar: tqdm
) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Return moments (n, 2, 2c, h, w), labels (n,), CRC-32s of the images' pixels (n,) and the sums of a shard."""
    count, first = len(numbers), numbers.start
    moments = torch.empty(count, *manifest.row, dtype=getattr(torch, manifest.dtype))
    labels, pixels = torch.empty(2, count, dtype=torch.int64)
    sums, start = Sums(manifest.latents), 0
    for images, batch_labels in batches:
        part = slice(start, start := start + len(images))
        for side, oriented in enumerate((images, images.flip(-1))):
            moments[part, side] = autoencoder.encode(oriented).to("cpu", moments.dtype)
        if not torch.isfinite(moments[part]).all():
            which = f"latents of images {first + part.start} to {first + part.stop - 1}"
            raise UserError(f"{which} are not finite in {manifest.dtype}: try --dtype bfloat16, in another folder")
        labels[part], pixels[part] = batch_labels, crc32(images, 1)
        sums.update(moments[part, 0], images)
        bar.update(len(images))
    return moments, labels, pixels, sums
