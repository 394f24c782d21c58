"""Images, latents and an autoencoder that the cases make for themselves, in temporary folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor

from uvit_decay.data.batches import ImageSet, StepLoader, StepSampler, mirror_half
from uvit_decay.data.classes import class_hash
from uvit_decay.latents.manifest import Manifest, Sums
from uvit_decay.latents.shards import Shard, write_labels, write_shard
from uvit_decay.latents.space import LatentSpace

SPACE = LatentSpace("random", "", 0.18215, 0.0, 4, 8)


def photographs(folder: Path, count: int, width: int = 500) -> Path:
    """Write `count` synthetic JPEGs in two classes, of 5 : 4 with grain, and return the folder."""
    for i in range(count):
        path = folder / ("a", "b")[i % 2] / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(i)
        size = width, width * 4 // 5
        coarse = Image.fromarray(random.integers(0, 256, (25, 20, 3), dtype=np.uint8)).resize(size)
        grain = random.normal(0, 8, (size[1], size[0], 3))
        Image.fromarray((np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return folder


def index(count: int, shard_size: int) -> Manifest:
    """Return the description of `count` latents of 256x256 images in a thousand classes."""
    classes = {f"n{i:08d}": len(range(i, count, 1000)) for i in range(1000)}
    settings = {"dtype": "float16", "precision": "float32", "batch_size": 16, "shard_size": shard_size}
    return Manifest(SPACE, "", "", count, 256, classes, None, class_hash(tuple(classes)), **settings)


def latents(folder: Path, count: int) -> tuple[Manifest, Tensor]:
    """Write random latents as `encode` does; return their description and moments (n, 2, 8, 32, 32)."""
    manifest, labels = index(count, 1024), torch.arange(count) % 1000
    every = torch.randn(count, *manifest.row).half()
    for number, (_, part) in enumerate(manifest.shards):
        rows = slice(part.start, part.stop)
        pixels = torch.zeros(len(part), dtype=torch.int64)
        write_shard(folder, manifest, number, Shard(every[rows], labels[rows], pixels, Sums(SPACE)))
    write_labels(folder, labels)
    return manifest, every


def loader(images: ImageSet, batch_size: int) -> StepLoader:
    """Return the loader of a training set, mirrored at random, in this process."""
    return StepLoader(
        images, StepSampler(len(images), batch_size, 0, 0, 1, shuffle=True), augment=partial(mirror_half, 0)
    )


def autoencoder(channels: tuple[int, ...]) -> AutoencoderKL:
    """Return an untrained autoencoder in the layout of Stable Diffusion's, which has 128, 256, 512, 512 channels."""
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=channels, layers_per_block=2, latent_channels=4, **kinds).eval()
