"""Convert latents of fast-DiT, REPA or LightningDiT into a folder for --data Latents, instead of encoding images again.

    python examples/import_latents.py SOURCE TARGET [--image-size 256] [--classes imagenet-1k]
    python train.py fit --config imagenet1k_sit_xl --data.path TARGET

SOURCE is one of these folders, read in the order of the project's own loader:

fast-DiT      *_features/N.npy, float32 (1, c, h, w): a sample of the posterior times 0.18215; *_labels/N.npy, (1,)
REPA          vae-sd/00000/img-mean-std-N.npy, float32 (2c, h, w): mean and standard deviation; vae-sd/dataset.json
LightningDiT  latents_rankRR_shardSSS.safetensors: `latents`, `latents_flip` (n, c, h, w), samples of each image and of
              its mirror image, `labels` (n,); latents_stats.pt: mean and standard deviation of each channel

Our format holds mean and log-variance of each image and of its mirror image. A sample is stored as a mean with the
log-variance -30. A mirror image is stored with its image, so that no split parts them; where a project has none, both
rows are the image's. Rows of float16 differ from the source by up to 0.05 %.

EDM2 writes files of REPA's names, but from pixels in [0, 1] instead of [-1, 1]: they cannot be told apart.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from uvit_decay.data.classes import class_hash, ordered_class_list
from uvit_decay.latents.autoencoder import NO_VARIANCE
from uvit_decay.latents.manifest import Manifest, Sums, statistics
from uvit_decay.latents.shards import Shard, write_labels, write_shard
from uvit_decay.latents.space import LatentSpace

STABLE_DIFFUSION = 0.18215  # scaling factor in the code of fast-DiT and REPA
SHARD = 1024  # images in a file
COLOUR_RANGE = 2.5  # standard deviations from grey to full colour in previews


@dataclass
class Source:
    """Latents of another project; `read` returns mean and log-variance, float32 (n, 2, 2c, h, w), of images."""

    project: str
    vae: str
    names: list[str]
    labels: list[int]
    normalisation: dict[str, Any]  # fields of LatentSpace
    mirrored: bool
    read: Callable[[slice], Tensor]


def open_fast_dit(folder: Path) -> Source:
    """Open files of fast-DiT, whose images were mirrored at random before they were encoded."""
    (features,) = folder.glob("*_features")
    classes = features.with_name(features.name.replace("_features", "_labels"))
    names = sorted(path.name for path in features.iterdir())  # as text, like its loader
    labels = [int(np.load(classes / name).item()) for name in names]

    def read(rows: slice) -> Tensor:
        samples = np.concatenate([np.load(features / name) for name in names[rows]])
        return add_mirror(add_variance(torch.from_numpy(samples).float() / STABLE_DIFFUSION))

    normalisation = {"scale": STABLE_DIFFUSION, "shift": 0.0}
    return Source("fast-DiT", "stabilityai/sd-vae-ft-ema", names, labels, normalisation, False, read)


def open_repa(folder: Path) -> Source:
    """Open files of REPA, whose images are never mirrored."""
    home = folder / "vae-sd"
    names = sorted(path.relative_to(home).as_posix() for path in home.rglob("*.npy"))
    label_of = dict(json.loads((home / "dataset.json").read_text())["labels"])
    labels = [label_of[name] for name in names]

    def read(rows: slice) -> Tensor:
        files = np.stack([np.load(home / name) for name in names[rows]])
        mean, std = torch.from_numpy(files).float().chunk(2, dim=1)
        log_variance = (2 * std.log()).clamp(min=NO_VARIANCE)
        return add_mirror(torch.cat([mean, log_variance], dim=1))

    normalisation = {"scale": STABLE_DIFFUSION, "shift": 0.0}
    return Source("REPA", "stabilityai/sd-vae-ft-mse", names, labels, normalisation, False, read)


def open_lightning_dit(folder: Path) -> Source:
    """Open shards of LightningDiT; they are opened again for each read."""
    files = sorted(folder.glob("latents_rank*_shard*.safetensors"))
    names, labels, places = [], [], []
    for file in files:
        for i, label in enumerate(load_file(file)["labels"].tolist()):
            names.append(f"{file.name}/{i}")
            labels.append(label)
            places.append((file, i))
    stats = torch.load(folder / "latents_stats.pt", weights_only=True)

    def read(rows: slice) -> Tensor:
        opened = {file: load_file(file) for file, _ in places[rows]}
        sides = []
        for key in ("latents", "latents_flip"):
            samples = torch.stack([opened[file][key][i] for file, i in places[rows]])
            sides.append(add_variance(samples.float()))
        return torch.stack(sides, dim=1)

    normalisation = {
        "scale": 1.0,
        "shift": 0.0,
        "channel_mean": stats["mean"].flatten().tolist(),
        "channel_std": stats["std"].flatten().tolist(),
    }
    vae = "VA-VAE (LightningDiT)"  # not a hub id: diffusers cannot load it; sample.py takes another one with --vae
    return Source("LightningDiT", vae, names, labels, normalisation, True, read)


def add_variance(samples: Tensor) -> Tensor:
    """Return samples (n, c, h, w) as mean and log-variance (n, 2c, h, w)."""
    return torch.cat([samples, torch.full_like(samples, NO_VARIANCE)], dim=1)


def add_mirror(moments: Tensor) -> Tensor:
    """Return moments (n, 2, 2c, h, w) of images without mirror images."""
    return torch.stack([moments, moments], dim=1)


def open_source(folder: Path) -> Source:
    """Open the latents in a folder, which are recognised by the names of its files."""
    if any(folder.glob("*_features")):
        return open_fast_dit(folder)
    if (folder / "vae-sd").is_dir():
        return open_repa(folder)
    if any(folder.glob("latents_rank*_shard*.safetensors")):
        return open_lightning_dit(folder)
    raise SystemExit(f"{folder} has no latents of fast-DiT (*_features), REPA (vae-sd) or LightningDiT (latents_rank*)")


def describe(folder: Path, source: Source, image_size: int, classes: str | None) -> Manifest:
    """Return the manifest of latents before they are converted."""
    _, _, channels, side, _ = source.read(slice(0, 1)).shape
    space = LatentSpace(
        source.vae, sha256="", channels=channels // 2, factor=image_size // side, **source.normalisation
    )
    counts = torch.tensor(source.labels).bincount().tolist()
    class_names = tuple(map(str, range(len(counts))))
    if classes is not None:
        class_names = ordered_class_list(classes)
        counts += [0] * (len(class_names) - len(counts))
    return Manifest(
        latents=space,
        source=str(folder),
        pictures=hashlib.sha256("\n".join(source.names).encode()).hexdigest(),
        count=len(source.names),
        image_size=image_size,
        classes=dict(zip(class_names, counts, strict=True)),
        class_list=classes,
        class_hash=class_hash(class_names),
        dtype="float16",
        precision="float32",
        batch_size=1,
        shard_size=SHARD,
    )


def false_colours(shards: list[Sums]) -> list[list[float]]:
    """Return a linear map from (x, 1) to RGB for latents without images: their three principal components.

    A component is a channel of the colour; COLOUR_RANGE standard deviations to either side of its mean are -1 and 1.
    """
    gram = torch.stack([sums.totals["gram"] for sums in shards]).sum(0)
    channels = len(gram) - 1
    mean = gram[channels, :channels] / gram[channels, channels]
    covariance = gram[:channels, :channels] / gram[channels, channels] - torch.outer(mean, mean)
    variances, vectors = torch.linalg.eigh(covariance)
    scale = COLOUR_RANGE * variances.flip(0)[:3].clamp(min=1e-12).sqrt()  # the largest variance first
    colours = vectors.flip(1)[:, :3] / scale
    return [*colours.tolist(), (-mean @ colours).tolist()]


def convert(folder: Path, target: Path, image_size: int, classes: str | None = None) -> Manifest:
    """Write all shards, the labels and the manifest; return the manifest."""
    source = open_source(folder)
    manifest = describe(folder, source, image_size, classes)
    target.mkdir(parents=True)  # an existing folder is not written into
    labels = torch.tensor(source.labels)
    every = []
    for number, (_, images) in enumerate(manifest.shards):
        rows = slice(images.start, images.stop)
        moments = source.read(rows).half()
        if not moments.isfinite().all():
            raise SystemExit(f"latents {images.start} to {images.stop - 1} of {folder} are not finite in float16")
        sums = Sums(manifest.latents)
        sums.update(moments[:, 0].float())
        write_shard(target, manifest, number, Shard(moments, labels[rows], None, sums))
        every.append(sums)
    write_labels(target, labels)
    numbers, _ = statistics(every)
    space = replace(manifest.latents, rgb=false_colours(every))
    # Written last: statistics mark the latents as complete.
    done = replace(manifest, latents=space, statistics=numbers)
    done.write(target)
    sides = "each with its mirror image" if source.mirrored else "without mirror images"
    print(f"{target}: {done.count} images of {source.project} in {2 * done.count} rows, {sides}")
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument("--image-size", type=int, default=256, help="pixels of the encoded images")
    parser.add_argument("--classes", help="class list that names the labels, such as imagenet-1k; default: numbers")
    options = parser.parse_args()
    convert(options.source, options.target, options.image_size, options.classes)
