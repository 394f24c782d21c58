"""python -m uvit_decay.data.latents encode <images> <folder> [--vae stabilityai/sd-vae-ft-ema] [--image-size 256] ...

Encode images and their mirror images once with a frozen autoencoder. After an interruption, run the same command again
to continue. On several GPUs: torchrun --nproc_per_node 8 -m uvit_decay.data.latents encode ...
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from uvit_decay.autoencoder import Autoencoder
from uvit_decay.data.classes import class_list
from uvit_decay.data.image_files import list_images
from uvit_decay.data.latents.encode import describe, encode
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import user_errors
from uvit_decay.sampling_options import check_numbers


def parse(args: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m uvit_decay.data.latents", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("encode", help="encode images, or go on doing so")
    command.add_argument("source", type=Path, help="folder, zip or tar of class folders")
    command.add_argument("target", type=Path, help="folder for the latents")
    command.add_argument(
        "--vae",
        default="stabilityai/sd-vae-ft-ema",
        help="AutoencoderKL or AutoencoderTiny: hub id or folder; default: stabilityai/sd-vae-ft-ema",
    )
    command.add_argument("--image-size", type=int, default=256, help="pixels after the centre crop; default: 256")
    command.add_argument("--classes", help="imagenet-100/cmc, imagenet-1k or a text file; default: all folders")
    command.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of what is stored")
    command.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="float32", help="of the autoencoder; default: float32"
    )
    command.add_argument("--batch-size", type=int, default=16, help="images at a time; default: 16")
    command.add_argument("--shard-size", type=int, default=1024, help="images in a file; default: 1024")
    command.add_argument("--workers", type=int, default=4, help="processes that decode images; default: 4")
    return parser.parse_args(args)


def main(args: Sequence[str]) -> None:
    """Encode, then print what was written and how to train on it."""
    options = parse(args)
    check_numbers(options)
    processes = Processes.launched()
    try:
        encode_images(options, processes)
    finally:
        processes.end()


def encode_images(options: argparse.Namespace, processes: Processes) -> None:
    """Encode on these processes; rank 0 prints what was written."""
    autoencoder = Autoencoder(options.vae, processes.device, getattr(torch, options.precision))
    listing = list_images(options.source, None if options.classes is None else class_list(options.classes))
    settings = {key: getattr(options, key) for key in ("image_size", "dtype", "precision", "batch_size", "shard_size")}
    manifest = describe(listing, autoencoder.space, options.classes, **settings)
    workers = min(options.workers, os.cpu_count() or 1)
    done = encode(listing, manifest, autoencoder, options.target, workers, processes)
    if processes.is_main:
        size = sum((options.target / name).stat().st_size for name, _ in done.shards) / 2**30
        channels = zip(done.statistics.mean, done.statistics.std, strict=True)
        shown = ", ".join(f"{mean:.3f} +- {std:.3f}" for mean, std in channels)
        print(f"{options.target}: {done.count} images, {len(done.class_names)} classes, {size:.2f} GiB")
        print(f"channels as networks see them: {shown}")
        classes = "" if options.classes == "imagenet-100/cmc" else f" --data.classes {options.classes or 'null'}"
        size = "" if done.size == 32 else f" --model.net.image_size {done.size}"
        flags = f"--config configs/imagenet100_uvit_m.yaml --data.path {options.target}{classes}{size}"
        print(f"train on them: python train.py fit {flags}")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
