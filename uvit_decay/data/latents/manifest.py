"""What a folder of latents holds and how it was made: manifest.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from uvit_decay.autoencoder import LatentSpace
from uvit_decay.disk import replacing
from uvit_decay.errors import UserError, one_line

NAME = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation, for each channel, of posterior samples as networks see them; without the mirrors."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a folder of latents.

    Args:
        latents: whose they are, and their scale. The linear map to RGB is there once all pictures are encoded.
        source: where the pictures were read.
        pictures: sha256 of their names, in order.
        count: pictures.
        image_size: height and width in pixels before encoding.
        classes: pictures of each class, by name, sorted; empty for pictures without classes.
        class_list: the name of the list that chose them; null if all folders were taken.
        class_hash: sha256 of the class names.
        dtype: of the stored moments.
        precision: in which the autoencoder worked.
        batch_size: pictures that it took at a time.
        shard_size: pictures in each shard; the last one holds the rest.
        statistics: null until all pictures are encoded.
        version: of this layout.
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
        return tuple(self.classes)

    @property
    def size(self) -> int:
        """Latent cells along each side."""
        return self.image_size // self.latents.factor

    @property
    def shards(self) -> list[tuple[str, range]]:
        """Name of each shard's file, and which pictures it holds."""
        number = math.ceil(self.count / self.shard_size)
        starts = range(0, self.count, self.shard_size)
        parts = (range(start, min(start + self.shard_size, self.count)) for start in starts)
        return [(f"shard-{k:05d}-of-{number:05d}.safetensors", part) for k, part in enumerate(parts)]

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest, whole or not at all."""
        with replacing(folder / NAME) as file:
            file.write(json.dumps(asdict(self), indent=1).encode())

    def check_continues(self, folder: Path) -> None:
        """Raise a UserError, with both values, if `folder` holds latents that were made otherwise."""
        if not (folder / NAME).exists():
            if any(folder.glob("shard-*")):
                raise UserError(f"{folder} holds shards but no {NAME} that says whose: choose another folder")
            return
        for (name, here), (_, there) in zip(_settings(self), _settings(read(folder, whole=False)), strict=True):
            if here != there:
                shown = (str(value)[:60] for value in (there, here))
                raise UserError(
                    "{}: was encoded with {} {}, not {}: choose another folder".format(folder, name, *shown)
                )


def _settings(manifest: Manifest) -> Iterator[tuple[str, object]]:
    """All that is fixed before the first picture is encoded, by name."""
    for name, value in asdict(manifest.latents).items():
        if name not in ("vae", "rgb"):  # the weights count, wherever they lie
            yield name, value
    for field in fields(manifest):
        if field.name not in ("latents", "source", "class_list", "statistics"):  # class_hash says which classes
            yield field.name, getattr(manifest, field.name)


def read(folder: Path, whole: bool = True) -> Manifest:
    """The manifest of a folder of latents; `whole` asks for all pictures to be encoded.

    Raises:
        UserError: no latents there, an unreadable manifest, one of another version, or not all are encoded.
    """
    path = folder / NAME
    if not path.is_file():
        command = f"python -m uvit_decay.data.latents encode <pictures> {folder}"
        raise UserError(f"{folder} holds no latents (no {NAME}): make them with {command}")
    try:
        values = json.loads(path.read_text())
        if values["version"] != VERSION:
            raise UserError(f"{path} has layout version {values['version']}, this program reads {VERSION}")
        values["latents"] = LatentSpace(**values["latents"])
        values["statistics"] = values["statistics"] and Statistics(*map(tuple, values["statistics"].values()))
        manifest = Manifest(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged or no manifest of latents ({one_line(error)})") from error
    if whole and manifest.statistics is None:
        done = sum((folder / name).exists() for name, _ in manifest.shards)
        raise UserError(
            f"{folder}: {done} of {len(manifest.shards)} shards are encoded; run the same encode command again to go on"
        )
    return manifest
