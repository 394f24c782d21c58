"""Latents of images and their mirror images, from JPEGs to files, by the layout of Stable Diffusion's autoencoder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks import made
from benchmarks.cases import Agreement, Case, Compared, Setting
from benchmarks.measuring import model_flops
from benchmarks.plain.loading import extract
from uvit_decay.data.listing import list_images
from uvit_decay.latents.autoencoder import Autoencoder
from uvit_decay.latents.encode import describe, encode
from uvit_decay.latents.shards import LatentSet
from uvit_decay.runtime.distributed import Processes

TOLERANCES = {"float32": 2e-3, "bf16": 0.05}  # of the moments, relative to their norm; ours are stored in float16
NAMES = {"float32": "float32", "bf16": "bfloat16"}
BATCH = 8


def cases(setting: Setting) -> Iterator[Case]:
    """Yield one case, in float32 and in bf16."""
    count, side = setting.size(8, 256, 4), setting.size(64, 256, 32)
    channels = (32,) * 4 if setting.quick else (128, 256, 512, 512)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = made.photographs(folder / "images", count, 100 if setting.quick else 500)
        vae = made.autoencoder(channels)
        vae.save_pretrained(folder / "vae")
        vae.to(setting.device)
        ours = {p: Autoencoder(str(folder / "vae"), setting.device, getattr(torch, NAMES[p])) for p in NAMES}
        runs, compared = {}, []
        for precision in NAMES:
            autocast = precision == "bf16"
            runs[precision] = partial(in_new_folder, encoded, images, ours[precision], side, precision)
            runs[f"plain {precision}"] = partial(in_new_folder, extracted, images, vae, side, autocast)
            off = difference(images, ours[precision], vae, side, precision)
            agreed = Agreement(off, TOLERANCES[precision])
            compared.append(Compared(precision, precision, f"plain {precision}", agreed, rate=precision))
        held = dict.fromkeys(runs, sum(4 * p.numel() for p in vae.parameters()))
        flops = 2 * count * image_flops(channels, side)
        yield Case(f"encode JPEGs to latents, {side}x{side}", count, runs, compared, 5, flops, held)


def in_new_folder(work: Callable[..., object], *arguments: object) -> None:
    """Call work(*arguments, folder) with a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        work(*arguments, Path(name))


def encoded(images: Path, autoencoder: Autoencoder, side: int, precision: str, folder: Path) -> LatentSet:
    """Encode with this package, in one process, and return the set."""
    listing = list_images(images)
    manifest = describe(
        listing,
        autoencoder.space,
        side,
        class_list=None,
        dtype="float16",
        precision=NAMES[precision],
        batch_size=BATCH,
        shard_size=1024,
    )
    with redirect_stderr(StringIO()):  # the progress bar
        done = encode(listing, manifest, autoencoder, folder, 0, Processes())
    return LatentSet(folder, done)


def extracted(images: Path, vae: nn.Module, side: int, autocast: bool, folder: Path) -> None:
    """Encode in the plain way."""
    extract(images, vae, side, BATCH, folder, autocast)


def difference(images: Path, autoencoder: Autoencoder, vae: nn.Module, side: int, precision: str) -> float:
    """Return how far the stored moments of both sides are apart."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        found = encoded(images, autoencoder, side, precision, Path(one))
        extracted(images, vae, side, precision == "bf16", Path(other))
        rows = [np.load(Path(other) / f"{i}_0.npy", allow_pickle=True)[0] for i in range(len(found))]
        ours, theirs = found[list(range(len(found)))][0].float(), torch.from_numpy(np.stack(rows))
        return ((ours - theirs).norm() / theirs.norm()).item()


def image_flops(channels: tuple[int, ...], side: int) -> int:
    """Return the FLOPs of encoding one image."""
    with torch.device("meta"):
        vae = made.autoencoder(channels)
        x = torch.empty(1, 3, side, side)
        return model_flops(lambda: vae.encode(x))
