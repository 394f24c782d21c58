"""Latents of images: uvit-decay encode <images> <folder> [--image-size 256] ...

On several GPUs: torchrun --nproc_per_node 8 -m -- uvit_decay encode ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from uvit_decay.generation.options import Count
from uvit_decay.terminal.command_line import run
from uvit_decay.terminal.program import PROGRAM
from uvit_decay.terminal.typed import Bounds

SHARES = timedelta(days=1)  # how long a process waits until the slowest one has encoded its share of the shards


def encode_images(
    source: Path,
    target: Path,
    *,
    vae: str = "stabilityai/sd-vae-ft-ema",
    image_size: Annotated[int, Bounds(1, 2**16)] = 256,
    classes: str | None = None,
    labels: str = "auto",
    name_column: str | None = None,
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
        name_column: column of the names of images in a table or metadata file.
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
    from uvit_decay.data.classes import class_list
    from uvit_decay.data.fingerprint import MOST_MEASURED, spread
    from uvit_decay.data.label_tables import Columns
    from uvit_decay.data.labels import NO_CLASSES, LabelOptions
    from uvit_decay.data.listing import check_columns, describe_listing, list_images
    from uvit_decay.data.reading import UNREAD, check_headers, leave_out_unreadable, store_list
    from uvit_decay.latents.autoencoder import Autoencoder
    from uvit_decay.latents.encode import describe, encode

    with open_program(timeout=SHARES) as (processes, device):
        autoencoder = Autoencoder(vae, device, getattr(torch, precision))
        names = None if classes is None else class_list(classes)
        columns = Columns(name_column, label_column)
        listing = list_images(source, names, LabelOptions(None if labels == NO_CLASSES else labels, columns))
        check_columns(columns, listing)
        if skip_unreadable:
            listing = leave_out_unreadable(listing)
        else:
            measured = spread(len(listing.members), MOST_MEASURED)
            check_headers(listing, measured, hint="; to leave such images out, set `skip_unreadable`")
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


COMMANDS = {"encode": encode_images}


def main(words: Sequence[str]) -> None:
    """Run a command line of this module; exit with one line on a user's mistake."""
    run(COMMANDS, __doc__, PROGRAM, words)
