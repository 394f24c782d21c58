"""The manifest of a folder of latents, manifest.json: its contents and the settings of the encoding."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import avg_pool2d

from uvit_decay.files.validation import as_type, read_json, write_json
from uvit_decay.latents.space import PER_CHANNEL, LatentSpace
from uvit_decay.pictures import to_float
from uvit_decay.terminal.errors import UserError

NAME = "manifest.json"
VERSION = 1
CHECKSUM = "crc32"  # of all fields, stored beside them
FORMER = ("mirrored", "posterior")  # fields that were True in all latents of `encode`


class ShardPlan(NamedTuple):
    """File name of a shard, and the indices of its images."""

    name: str
    images: range


@dataclass(frozen=True)
class Manifest:
    """The description of a folder of latents.

    Args:
        latents: the autoencoder and its normalisation; the linear map to RGB is set once all images are encoded.
        source: path of the images.
        pictures: sha256 of the image names, in order (an old name of this key).
        count: number of images.
        image_size: height and width in pixels before encoding.
        classes: number of images of each class, by name, sorted; empty for images without classes.
        class_list: name of the class list that selected the images; null if all folders were taken.
        class_hash: sha256 of the class names.
        dtype: dtype of the stored moments.
        precision: dtype of the autoencoder's computation.
        batch_size: images per call of the autoencoder.
        shard_size: images per shard; the last shard holds the rest.
        statistics: null until all images are encoded.
        version: version of this layout.
    """

    latents: LatentSpace
    source: str
    pictures: str
    count: int
    image_size: int
    classes: dict[str, int]
    class_list: str | None
    class_hash: str
    dtype: Literal["float16", "bfloat16"]
    precision: Literal["float32", "bfloat16"]
    batch_size: int
    shard_size: int
    statistics: Statistics | None = None
    version: int = VERSION

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels."""
        return tuple(self.classes)

    @property
    def size(self) -> int:
        """Latent cells along each side."""
        return self.image_size // self.latents.factor

    @property
    def row(self) -> tuple[int, int, int, int]:
        """Shape of the moments of one image and its mirror image: (2, 2c, h, w)."""
        return 2, 2 * self.latents.channels, self.size, self.size

    @property
    def row_bytes(self) -> int:
        """Bytes of the moments of one image and its mirror image."""
        return getattr(torch, self.dtype).itemsize * math.prod(self.row)

    @cached_property
    def shards(self) -> list[ShardPlan]:
        """File name and images of each shard."""
        number = math.ceil(self.count / self.shard_size)
        shards = []
        for k in range(number):
            start = k * self.shard_size
            end = min(start + self.shard_size, self.count)
            shards.append(ShardPlan(f"shard-{k:05d}-of-{number:05d}.safetensors", range(start, end)))
        return shards

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the settings and the image names, stored in each shard."""
        text = json.dumps(dict(_settings(self)))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def content_hash(self) -> str:
        """SHA-256 of `fingerprint` and the statistics, which other images of the same names would change."""
        statistics = None if self.statistics is None else asdict(self.statistics)
        text = json.dumps([self.fingerprint, statistics])
        return hashlib.sha256(text.encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest atomically."""
        values = asdict(self)
        write_json(folder / NAME, {**values, CHECKSUM: _crc32(values)})

    def check_continues(self, folder: Path) -> None:
        """Raise a UserError, with both values, if `folder` holds latents encoded with other settings."""
        if not (folder / NAME).exists():
            return
        stored = dict(_settings(read(folder, whole=False)))
        ours = dict(_settings(self))
        for name in (*ours, *stored):
            if ours.get(name) != stored.get(name):
                actual = str(stored.get(name))[:60]
                expected = str(ours.get(name))[:60]
                raise UserError(
                    f"{folder}: its latents were encoded with {name} {actual}, not {expected}; choose another folder"
                )


def _settings(manifest: Manifest) -> Iterator[tuple[str, object]]:
    """Yield name and value of each setting that is fixed before the first image is encoded."""
    for name, value in asdict(manifest.latents).items():
        if name in ("vae", "rgb"):  # sha256 identifies the weights, wherever they are stored
            continue
        if name in PER_CHANNEL and value is None:  # the fingerprints in shards are made without them
            continue
        yield name, value
    for field in fields(manifest):
        if field.name not in ("latents", "source", "class_list", "statistics"):  # class_hash identifies the classes
            yield field.name, getattr(manifest, field.name)


def read(folder: Path, whole: bool = True) -> Manifest:
    """Return the manifest of a folder of latents; `whole` requires that all images are encoded."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder} has no latents (no {NAME}): make them with uvit-decay encode <images> <new folder>")
    values = read_json(path, dict[str, object])
    version = values.get("version")
    if version != VERSION:
        raise UserError(f"{path} has layout version {version}, this program reads {VERSION}; encode the images again")
    if CHECKSUM in values and values.pop(CHECKSUM) != _crc32(values):
        raise UserError(f"{path} is damaged: its {CHECKSUM} differs; only if you edited it, remove this field")
    if not all(values.pop(name, True) for name in FORMER):
        raise UserError(f"{path} is of latents of another project: convert them again with examples/import_latents.py")
    manifest = as_type(Manifest, values, str(path))
    if whole and manifest.statistics is None:
        done = sum((folder / shard.name).exists() for shard in manifest.shards)
        raise UserError(f"{folder}: {done} of {len(manifest.shards)} shards are encoded; run the same command again")
    return manifest


def _crc32(values: dict[str, Any]) -> int:
    text = json.dumps(values, sort_keys=True)
    return zlib.crc32(text.encode())


@dataclass(frozen=True)
class Statistics:
    """Per-channel mean and standard deviation of posterior samples x = (z - shift) * scale, without mirror images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Sums:
    """Float64 sums over latent cells, from which mean, standard deviation and the linear map to RGB are computed.

    With x = (z - shift) * scale, z the posterior mean, and y the image averaged over a cell, in [-1, 1]: `gram` is
    (x, 1)^T (x, 1), `cross` is (x, 1)^T y, and `variance` sums the posterior variance of x.
    """

    def __init__(self, space: LatentSpace) -> None:
        self.space = space
        rows = space.channels + 1
        self.totals = {
            "gram": torch.zeros(rows, rows, dtype=torch.float64),
            "cross": torch.zeros(rows, 3, dtype=torch.float64),
            "variance": torch.zeros(space.channels, dtype=torch.float64),
        }

    def update(self, moments: Tensor, images: Tensor | None = None) -> None:
        """Add a batch: moments (b, 2c, h, w) without the mirror images, and uint8 images (b, 3, H, W), if known."""
        x = rearrange(self.space.mean(moments).double(), "b c h w -> (b h w) c")
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        self.totals["gram"] += x.T @ x
        if images is not None:
            cells = avg_pool2d(to_float(images), self.space.factor).double()
            self.totals["cross"] += x.T @ rearrange(cells, "b c h w -> (b h w) c")
        log_variance = moments[:, self.space.channels :].double()
        variance = log_variance.exp().sum(dim=(0, 2, 3))
        self.totals["variance"] += self.space.scales**2 * variance

    def to_json(self) -> str:
        """Return the sums as text."""
        return json.dumps({name: total.tolist() for name, total in self.totals.items()})

    @classmethod
    def from_json(cls, text: str, space: LatentSpace) -> Sums:
        """Return the sums of `to_json`."""
        values = json.loads(text)
        sums = cls(space)
        for name in sums.totals:
            sums.totals[name] = torch.tensor(values[name], dtype=torch.float64)
        return sums


def statistics(shards: Sequence[Sums]) -> tuple[Statistics, list[list[float]]]:
    """Return the statistics of all latents, and the linear map from (x, 1) to RGB, from the sums of all shards."""
    gram = _add(shards, "gram")
    cross = _add(shards, "cross")
    variance = _add(shards, "variance")
    channels = len(variance)
    cells = gram[channels, channels]
    mean = gram[channels, :channels] / cells
    spread = (gram.diagonal()[:channels] + variance) / cells - mean.square()
    std = spread.clamp(min=0).sqrt()  # rounding can make the variance of a constant channel negative
    rgb = torch.linalg.pinv(gram, hermitian=True) @ cross
    return Statistics(tuple(mean.tolist()), tuple(std.tolist())), rgb.tolist()


def _add(shards: Sequence[Sums], name: str) -> Tensor:
    totals = [sums.totals[name] for sums in shards]
    return torch.stack(totals).sum(0)
