"""Random pixels, and the folders, zips and tars that the tests of images write them to."""

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from refusals import raises_user_error

from uvit_decay.data.listing import list_images

SIZE = 8


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def fails(path: object, *words: str, look: Callable = list_images) -> None:
    """Check that `look` refuses a path with a line that has the path and these words."""
    with raises_user_error(path, *words):
        look(path)


def tree(root: Path, names: list[str], size: int = SIZE) -> Path:
    """Write a folder with one distinct image for each name."""
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(size, size, 3, seed=seed)).save(root / name)
    return root


def turn(path: Path) -> None:
    """Replace an image by another one of the same name and size."""
    with Image.open(path) as image:
        image.transpose(Image.Transpose.ROTATE_180).save(path)


def write_zip(folder: Path, file: Path, prefix: str = "") -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*"), reverse=True):  # the order in the zip must not matter
            if path.is_file():
                archive.writestr(prefix + path.relative_to(folder).as_posix(), path.read_bytes())
    return file


def write_tar(folder: Path, file: Path, prefix: str = "", layout: int = tarfile.PAX_FORMAT, mode: str = "w") -> Path:
    """Write an uncompressed tar, last file first, with entries for folders as tar itself writes them."""
    with tarfile.open(file, mode, format=layout) as archive:
        for path in sorted(folder.rglob("*"), reverse=True):
            archive.add(path, prefix + path.relative_to(folder).as_posix(), recursive=False)
    return file


def tar_of(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file
