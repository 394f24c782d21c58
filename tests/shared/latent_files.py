"""The latents of 22 small images; conftest.py has the fixtures."""

import shutil

from uvit_decay.commands.encode import COMMANDS
from uvit_decay.latents import manifest as manifests
from uvit_decay.latents.shards import LatentSet
from uvit_decay.terminal.command_line import parse

SIZE, COUNT = 32, 22  # pixels: 4 x 4 latent cells; 22 images in shards of 4 are 6 shards, the last one half full
FLAGS = ["--image-size", str(SIZE), "--shard-size", "4", "--batch-size", "3", "--workers", "0"]


def encode(image_dir, target, vae, *flags):
    parse(COMMANDS, ["encode", str(image_dir), str(target), "--vae", str(vae), *FLAGS, *flags])()
    return target


def open_set(folder, **options):
    return LatentSet(folder, manifests.read(folder), **options)


def copy_set(folder, target):
    """Copy the latents to a folder that the test may damage."""
    return shutil.copytree(folder, target, dirs_exist_ok=True)
