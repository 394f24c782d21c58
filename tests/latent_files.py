"""The latents of twenty-two small pictures, for the tests of latents; conftest.py has the fixtures."""

from uvit_decay.data.latents import manifest as manifests
from uvit_decay.data.latents.__main__ import main
from uvit_decay.data.latents.shards import LatentSet

SIZE, COUNT = 32, 22  # pixels: 4 x 4 latent cells; 22 pictures in shards of 4 are 6 shards, the last one half full
FLAGS = ["--image-size", str(SIZE), "--shard-size", "4", "--batch-size", "3", "--workers", "0"]


def encode(pictures, target, vae, *flags):
    main(["encode", str(pictures), str(target), "--vae", str(vae), *FLAGS, *flags])
    return target


def open_set(folder):
    return LatentSet(folder, manifests.read(folder))
