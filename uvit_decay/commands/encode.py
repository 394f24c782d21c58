"""Latents of images: uvit-decay encode <images> <folder> [--image-size 256] ...

On several GPUs: torchrun --nproc_per_node 8 -m -- uvit_decay encode ...
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from uvit_decay.generation.options import Count
from uvit_decay.runtime.command_line import Bounds, run
from uvit_decay.runtime.program import PROGRAM

SHARES = timedelta(days=1)  # how long a process waits until the slowest one has encoded its share of the shards


def encode_images(
    source: Path,
    target: Path,
    *,
    vae: str = "stabilityai/sd-vae-ft-ema",
    image_size: Annotated[int, Bounds(1, 2**16)] = 256,
    classes: str | None = None,
    dtype: Literal["float16", "bfloat16"] = "float16",
    precision: Literal["float32", "bfloat16"] = "float32",
    batch_size: Count = 16,
    shard_size: Count = 1024,
    workers: Annotated[int, Bounds(0, 2**16)] = 4,
) -> None:
    """Encode images and their mirror images with a frozen autoencoder.

    After an interruption, run the same command again to continue.

    Args:
        source: folder, zip or tar of class folders.
        target: folder for the latents.
        vae: autoencoder of diffusers (AutoencoderKL, AutoencoderDC, AutoencoderTiny): hub id or folder.
        image_size: pixels after the centre crop.
        classes: imagenet-100/cmc, imagenet-1k or a text file; default: all folders.
        dtype: of what is stored.
        precision: of the autoencoder.
        batch_size: images at a time.
        shard_size: images in a file.
        workers: processes that decode images.
    """
    import torch

    from uvit_decay.commands.opening import open_program
    from uvit_decay.data.image_files import list_images
    from uvit_decay.data.latents.encode import describe, encode
    from uvit_decay.images.autoencoder import Autoencoder
    from uvit_decay.images.class_names import class_list

    with open_program(timeout=SHARES) as (processes, device):
        autoencoder = Autoencoder(vae, device, getattr(torch, precision))
        listing = list_images(source, None if classes is None else class_list(classes))
        manifest = describe(
            listing,
            autoencoder.space,
            image_size,
            class_list=classes,
            dtype=dtype,
            precision=precision,
            batch_size=batch_size,
            shard_size=shard_size,
        )
        workers = min(workers, os.cpu_count() or 1)
        done = encode(listing, manifest, autoencoder, target, workers, processes)
    if processes.is_main:
        size = sum((target / name).stat().st_size for name, _ in done.shards) / 2**30
        print(f"{target}: {done.count} images, {len(done.class_names)} classes, {size:.2f} GiB")


COMMANDS = {"encode": encode_images}


def main(words: Sequence[str]) -> None:
    """Run a command line of this module; exit with one line on a user's mistake."""
    run(COMMANDS, __doc__, PROGRAM, words)
