"""Kinds of files with pictures: folders, zips and tars of images."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cases import Kind, Sources, anything_valid
from image_noise import noise, tree, write_tar, write_zip
from PIL import Image

from uvit_decay.data import Images
from uvit_decay.data.decoding import Box, Decoding, decode_box

SIDE = 8
NAMES = ["cat/a.png", "cat/b.png", "dog/c.png", "dog/d.png"]
MODES = ("L", "RGB", "RGBA", "P", "I;16", "LA", "1")


def images_in(path: Path) -> dict[str, Any]:
    """Return the pictures at a path as a data module reads them to train, one digest each."""
    data = Images(str(path), image_size=SIDE, batch_size=1)
    data.setup()
    pictures = [hashlib.sha256(picture.numpy().tobytes()).hexdigest() for picture in data.train.images]
    return {"pictures": pictures, "labels": data.train.labels.tolist(), "classes": data.class_names}


def known_pictures(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Allow other names and fewer pictures, which archives do not protect; each picture must be one of the original."""
    return set(after["pictures"]) <= set(before["pictures"])


def make_pngs(folder: Path, sources: Sources) -> None:
    """Make pictures of several modes, as large as they are read: nothing is scaled."""
    for i, mode in enumerate(MODES):
        (folder / "images" / "cd"[i % 2]).mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray(noise(SIDE, SIDE, seed=i).astype(np.uint16) * 257) if mode == "I;16" else None
        picture = grey or Image.fromarray(noise(SIDE, SIDE, 3, seed=i)).convert(mode)
        picture.save(folder / "images" / "cd"[i % 2] / f"{i}.png")


def make_jpegs(folder: Path, sources: Sources) -> None:
    for i, options in enumerate(({}, {"progressive": True}, {"quality": 100, "subsampling": 0}, {"optimize": True})):
        (folder / "images").mkdir(exist_ok=True)
        picture = Image.fromarray(noise(24, 32, 3, seed=i)).convert(("RGB", "L", "CMYK", "RGB")[i])
        picture.save(folder / "images" / f"{i}.jpg", **options)


def _choose_quarter(height: int, width: int) -> Box:
    return Box(0, 0, max(height // 2, 1), max(width // 2, 1))


def read_jpegs(folder: Path, file: Path) -> Any:
    """Return the pictures, and a part of the one that was changed as it is decoded to be augmented."""
    pictures = images_in(folder / "images")
    if file.is_file():
        with file.open("rb") as opened:
            part = decode_box(opened, str(file), Decoding(4, 3), _choose_quarter)
        pictures["part"] = np.asarray(part)
    return pictures


def make_archives(folder: Path, sources: Sources) -> None:
    images = tree(folder.parent / "tree", NAMES)
    write_zip(images, folder / "images.zip")
    write_tar(images, folder / "images.tar")
    shutil.rmtree(images)


IMAGE_KINDS = {
    "PNG": Kind(make_pngs, lambda folder, _: images_in(folder / "images"), "images/*/*.png", (), known_pictures),
    "JPEG": Kind(make_jpegs, read_jpegs, "images/*.jpg", (), anything_valid),
    "zip of images": Kind(make_archives, lambda _, file: images_in(file), "*.zip", (), known_pictures),
    "tar of images": Kind(make_archives, lambda _, file: images_in(file), "*.tar", (), known_pictures),
}
