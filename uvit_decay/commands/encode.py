"""Latents of images: uvit-decay encode <images> <folder> [--image-size 256] ...

Latents that fast-DiT, REPA or LightningDiT wrote: uvit-decay import-latents <their folder> <folder>

On several GPUs: torchrun --nproc_per_node 8 -m -- uvit_decay encode ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from uvit_decay.generation.options import Count
from uvit_decay.runtime.command_line import run
from uvit_decay.runtime.errors import check_numbers
from uvit_decay.runtime.files import quote_path
from uvit_decay.runtime.program import PROGRAM
from uvit_decay.runtime.progress import track
from uvit_decay.runtime.typed import Bounds

if TYPE_CHECKING:
    from uvit_decay.data.latents.manifest import Manifest
    from uvit_decay.data.listing import Listing

SHARES = timedelta(days=1)  # how long a process waits until the slowest one has encoded its share of the shards


def encode_images(
    source: Path,
    target: Path,
    *,
    vae: str = "stabilityai/sd-vae-ft-ema",
    image_size: Annotated[int, Bounds(1, 2**16)] = 256,
    classes: str | None = None,
    labels: str = "auto",
    label_column: str | None = None,
    dtype: Literal["float16", "bfloat16"] = "float16",
    precision: Literal["float32", "bfloat16"] = "float32",
    batch_size: Count = 16,
    shard_size: Count = 1024,
    workers: Annotated[int, Bounds(0, 2**16)] = 4,
    skip_unreadable: bool = False,
) -> None:
    """Encode images and their mirror images with a frozen autoencoder.

    After an interruption, run the same command again to continue.

    Args:
        source: folder, zip or tar of images.
        target: folder for the latents.
        vae: autoencoder of diffusers (AutoencoderKL, AutoencoderDC, AutoencoderTiny): hub id or folder.
        image_size: pixels after the centre crop.
        classes: imagenet-100/cmc, imagenet-1k or a text file; default: all classes.
        labels: auto, folders, leaf, null or a file with a table, see --data.labels of the data module Images.
        label_column: column of the labels in a table or metadata file.
        dtype: of what is stored.
        precision: of the autoencoder.
        batch_size: images at a time.
        shard_size: images in a file.
        workers: processes that decode images.
        skip_unreadable: leave out images that cannot be read; TARGET/unread.txt lists them.
    """
    import torch

    from uvit_decay.commands.opening import open_program
    from uvit_decay.data.latents.encode import describe, encode
    from uvit_decay.data.listing import describe_listing
    from uvit_decay.data.reading import UNREAD, store_list
    from uvit_decay.images.autoencoder import Autoencoder

    with open_program(timeout=SHARES) as (processes, device):
        autoencoder = Autoencoder(vae, device, getattr(torch, precision))
        listing = _list_source(source, classes, labels, label_column, skip_unreadable)
        if processes.is_main:
            print(f"{source}: {describe_listing(listing, image_size, str(target / UNREAD))}", file=sys.stderr)
        sizes = {"batch_size": batch_size, "shard_size": shard_size}
        space = autoencoder.space
        manifest = describe(listing, space, image_size, class_list=classes, dtype=dtype, precision=precision, **sizes)
        workers = min(workers, os.cpu_count() or 1)
        done = encode(listing, manifest, autoencoder, target, workers, processes)
    if processes.is_main:
        if listing.left_out:
            store_list(listing.left_out, target / UNREAD)
        size = sum((target / name).stat().st_size for name, _ in done.shards) / 2**30
        print(f"{target}: {done.count} images, {len(done.class_names)} classes, {size:.2f} GiB")


def _list_source(
    source: Path, classes: str | None, labels: str, label_column: str | None, skip_unreadable: bool
) -> Listing:
    """List the images to encode, without those that cannot be read, or look at headers before the work starts.

    Arguments as in `encode_images`.
    """
    from uvit_decay.data.classes import class_list
    from uvit_decay.data.fingerprint import MOST_MEASURED, spread
    from uvit_decay.data.labels import NO_CLASSES, LabelOptions
    from uvit_decay.data.listing import list_images
    from uvit_decay.data.reading import check_headers, leave_out_unreadable

    names = None if classes is None else class_list(classes)
    options = LabelOptions(None if labels == NO_CLASSES else labels, label_column, "--labels", "--label-column")
    listing = list_images(source, names, options)
    if skip_unreadable:
        return leave_out_unreadable(listing)
    measured = spread(len(listing.members), MOST_MEASURED)
    check_headers(listing, measured, hint="; to leave such images out, add --skip-unreadable")
    return listing


def import_latents(
    source: Path,
    target: Path,
    *,
    vae: str | None = None,
    scale: float | None = None,
    image_size: Annotated[int | None, Bounds(1, 2**16)] = None,
    classes: str | None = None,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    shard_size: Count = 1024,
) -> None:
    """Convert latents of fast-DiT, REPA or LightningDiT, which are recognised by their files, for training.

    After an interruption, run the same command again to continue.

    Args:
        source: the folder that holds imagenet256_features and imagenet256_labels (fast-DiT); vae-sd with dataset.json
            (REPA); or latents_rank*_shard*.safetensors with latents_stats.pt (LightningDiT).
        target: new folder for the latents.
        vae: autoencoder that encoded them, hub id or folder; default: the project's.
        scale: factor that normalises the latents; default: 0.18215, for LightningDiT the statistics of each channel.
        image_size: pixels of the encoded images; default: from the files.
        classes: class list that names the labels, such as imagenet-1k, or text file with the name of label k in line
            k + 1; default: numbers.
        dtype: of what is stored; float16 halves the files.
        shard_size: images in a file.
    """
    from uvit_decay.data.latents.convert import convert, describe
    from uvit_decay.data.latents.foreign import open_foreign

    check_numbers("(0, inf)", scale=1.0 if scale is None else scale)
    with track():
        latents = open_foreign(source)
        manifest = describe(source, latents, vae, scale, image_size, classes, dtype, shard_size)
        done = convert(latents, manifest, target)
    print(f"{target}: {done.count} images of {latents.writer}, {len(done.class_names)} classes, {_describe(done)}")
    flip = "" if done.mirrored else " --data.flip false"
    print(f"train on them with --data Latents --data.path {quote_path(target)}{flip}")


def _describe(manifest: Manifest) -> str:
    """Return the shape, the normalisation and the contents of latents in words."""
    space = manifest.latents
    shape = f"{space.channels}x{manifest.size}x{manifest.size} of {manifest.image_size} pixels"
    factor = f"scale {space.scale:g}"
    if space.channel_std is not None:
        factor += " and the mean and std of each channel"
    kind = "mean and variance" if manifest.posterior else "one sample each"
    mirror = "with mirror images" if manifest.mirrored else "no mirror images"
    return f"{shape}, {factor}, {kind}, {mirror}; previews show false colours"


COMMANDS = {"encode": encode_images, "import-latents": import_latents}


def main(words: Sequence[str]) -> None:
    """Run a command line of this module; exit with one line on a user's mistake."""
    run(COMMANDS, __doc__, PROGRAM, words)
