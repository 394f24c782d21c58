"""Encode images to latents once: on any number of processes and devices, resumable, with reproducible bytes.

A shard is the unit of work: one process encodes it, in batches that never cross its borders, and writes it atomically.
An interrupted run therefore continues with the missing shards. Their bytes are the same as in an uninterrupted run on
the same kind of device, with the same versions and, on CPUs, the same number of threads. Shards of older versions
differ by rounding: about 1e-6 of the moments in float32, 1 % in bfloat16, which is the error of either version.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from uvit_decay.data.classes import class_hash
from uvit_decay.data.decoding import Decoding
from uvit_decay.data.listing import Listing
from uvit_decay.data.reading import OnDisk, warn_of_dark_images
from uvit_decay.files.writing import check_writable, claim_paths, remove_remains
from uvit_decay.latents.autoencoder import Autoencoder
from uvit_decay.latents.manifest import Manifest, Sums, read, statistics
from uvit_decay.latents.shards import Shard, check_shard, check_space, crc32, read_sums, write_labels, write_shard
from uvit_decay.latents.space import LatentSpace
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.random import subset
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.progress import Work, track

AT_ONCE = 256  # images to read for a comparison


def describe(listing: Listing, space: LatentSpace, image_size: int, **settings: Any) -> Manifest:
    """Return the manifest of these images before any is encoded; `settings` are further fields of `Manifest`."""
    if image_size < 1 or image_size % space.factor:
        raise UserError(f"`image_size` {image_size} is not a multiple of {space.factor}, the factor of the autoencoder")
    labels = torch.tensor(listing.labels)
    counts = labels.bincount(minlength=len(listing.class_names)).tolist()
    names = "\n".join(listing.members).encode(errors="surrogateescape")
    return Manifest(
        latents=space,
        source=str(listing.path),
        pictures=hashlib.sha256(names).hexdigest(),
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

    Existing shards are read and compared with their checksums; damaged ones are encoded again.

    Raises:
        UserError: `folder` has latents of other images or settings, or the disk is too small.
    """
    check_writable(folder, folder=True)
    processes.check_shared(folder)
    images = OnDisk(listing, list(range(manifest.count)), Decoding(manifest.image_size, channels=3))
    if processes.size > 1:
        compared = images.stored(subset(images, COMPARED, "compared"))
        checksums = crc32(compared, 1).tolist()
        processes.check_same(f"settings or images of {listing.path}", [manifest.fingerprint, checksums])
    with claim_paths(folder, first=processes.is_main):
        if processes.is_main:
            remove_remains(folder)  # before any process of this program writes
        missing = _find_missing(images, manifest, folder, processes)
        if processes.is_main and missing:
            hint = "files of 12 bits in 16 have to be scaled to 16 bits first"
            warn_of_dark_images(str(listing.path), images, hint)
            manifest.write(folder)
        own = missing[processes.rank :: processes.size]
        _encode_shards(images, manifest, autoencoder, folder, own, workers, processes)
        processes.wait()
        if processes.is_main:
            write_labels(folder, images.labels)
            numbers, rgb = statistics(list(read_sums(folder, manifest)))
            latents = replace(manifest.latents, rgb=rgb)
            # Written last: statistics mark the latents as complete.
            replace(manifest, latents=latents, statistics=numbers).write(folder)
        processes.wait()
    return read(folder)


def _find_missing(images: OnDisk, manifest: Manifest, folder: Path, processes: Processes) -> list[int]:
    """Return the shards to encode; each process first verifies its share of the existing ones, then their images."""
    manifest.check_continues(folder)
    numbers = range(len(manifest.shards))
    checksums = _verify_shards(images, manifest, folder, numbers[processes.rank :: processes.size])
    processes.wait()
    missing = [k for k in numbers if not (folder / manifest.shards[k].name).exists()]
    missing = processes.broadcast(missing)  # another process may list them later, after this one has written some
    check_space(folder, manifest, len(missing))
    most = manifest.shard_size if missing else 1
    _check_images(images, manifest, folder, checksums, most)
    return missing


def _verify_shards(images: OnDisk, manifest: Manifest, folder: Path, numbers: range) -> dict[int, Tensor]:
    """Remove damaged shards, with a remark; return the checksums of the images of the others, by shard."""
    checksums = {}
    for number in numbers:
        name, part = manifest.shards[number]
        path = folder / name
        if not path.exists():
            continue
        try:
            pixels = check_shard(folder, manifest, number, images.labels[part.start : part.stop])
        except UserError as error:
            print(f"{error}; it is encoded again", file=sys.stderr)
            path.unlink()
            continue
        if pixels is not None:
            checksums[number] = pixels
    return checksums


def _check_images(images: OnDisk, manifest: Manifest, folder: Path, checksums: dict[int, Tensor], most: int) -> None:
    """Raise a UserError if one of the first `most` images of a shard is not the image that was encoded.

    If shards are missing, all images are compared, so that new shards do not mix with shards of older images; it takes
    as long as decoding them. Otherwise the first images reveal other images of the same names.
    """
    shown = most > 1 and len(checksums) > 0
    with track("comparing shards with their images", len(checksums), "shard", shown=shown) as work:
        for number, pixels in checksums.items():
            shard = manifest.shards[number]
            chosen = shard.images[:most]
            for start in range(0, len(chosen), AT_ONCE):
                some = chosen[start : start + AT_ONCE]
                same = crc32(images.stored(list(some)), 1) == pixels[start : start + len(some)]
                if not same.all():
                    image = images.listing.members[some[int(same.int().argmin())]]
                    raise UserError(
                        f"{images.listing.path}: {image} is not the image that was encoded to {folder / shard.name}; "
                        "choose another folder"
                    )
            work.update()


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
    step = manifest.batch_size
    batches: list[list[int]] = []
    for number in numbers:
        part = manifest.shards[number].images
        for start in range(0, len(part), step):
            batches.append(list(part[start : start + step]))
    stream = iter(DataLoader(images, sampler=batches, batch_size=None, num_workers=workers))
    total = sum(map(len, batches))
    with track("encoding", total, "image", shown=processes.is_main) as work:
        for number in numbers:
            part = manifest.shards[number].images
            shard_batches = islice(stream, -(-len(part) // step))
            shard = _encode_shard(shard_batches, part, manifest, autoencoder, work)
            write_shard(folder, manifest, number, shard)


def _encode_shard(
    batches: Iterator[tuple[Tensor, Tensor]], numbers: range, manifest: Manifest, autoencoder: Autoencoder, work: Work
) -> Shard:
    """Return the moments, labels, checksums and sums of the images at `numbers`, read from `batches`."""
    count = len(numbers)
    moments = torch.empty(count, *manifest.row, dtype=getattr(torch, manifest.dtype))
    labels = torch.empty(count, dtype=torch.int64)
    pixels = torch.empty(count, dtype=torch.int64)
    sums = Sums(manifest.latents)
    start = 0
    for images, batch_labels in batches:
        end = start + len(images)
        # Both orientations are kept: an encoder does not commute with mirroring.
        for side, oriented in enumerate((images, images.flip(-1))):
            moments[start:end, side] = autoencoder.encode(oriented).to("cpu", moments.dtype)
        if not torch.isfinite(moments[start:end]).all():
            which = f"latents of images {numbers.start + start} to {numbers.start + end - 1}"
            raise UserError(f"{which} are not finite in {manifest.dtype}; try `dtype` bfloat16, in another folder")
        labels[start:end] = batch_labels
        pixels[start:end] = crc32(images, 1)
        sums.update(moments[start:end, 0], images)
        work.update(len(images))
        start = end
    return Shard(moments, labels, pixels, sums)
