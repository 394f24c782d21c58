"""Segmentation masks of images: PNGs of the same names, whose values are classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from uvit_decay.data.image_files import Listing, open_image
from uvit_decay.evaluation.image_sources import FileImages, ImageSource
from uvit_decay.runtime.errors import UserError

MODES = ("L", "P", "1", "I", "I;16")  # of PIL; with a palette (P), the indices are the classes


@dataclass(frozen=True)
class Masks:
    """Masks in `folder` of the images in `listing`; `members` are the indices of the images that have one."""

    folder: Path
    listing: Listing
    members: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path, images: ImageSource) -> Masks:
        """Find the masks of `images`: cat/07.jpg has the mask cat/07.png.

        Raises:
            UserError: images without names, no such folder, or no mask in it.
        """
        if not isinstance(images, FileImages):
            raise UserError("--masks needs images with names: a folder, zip or tar of them")
        if not folder.is_dir():
            raise UserError(f"--masks {folder}: no such folder")
        listing = images.listing
        members = tuple(i for i, name in enumerate(listing.members) if _mask(folder, name).is_file())
        if not members:
            wanted = _mask(folder, listing.members[0])
            raise UserError(f"--masks {folder}: no mask of any of the images; the first would be {wanted}")
        return cls(folder, listing, members)

    def read(self, indices: Sequence[int], side: int) -> Int64[Tensor, "n side side"]:
        """Read the masks of the images at `indices`, cropped as the images are, by nearest pixels.

        Raises:
            UserError: a mask that cannot be read, has colours instead of classes, or another size than its image.
        """
        with self.listing.opened() as fetch:
            return torch.stack([self._one(i, fetch, side) for i in indices])

    def _one(self, index: int, fetch: Callable[[int], BytesIO], side: int) -> Int64[Tensor, "side side"]:
        name = self.listing.members[index]
        path = _mask(self.folder, name)
        with open_image(fetch(index), name) as image:
            wanted = image.size
        with path.open("rb") as file, open_image(file, str(path)) as mask:
            mode, values = mask.mode, np.asarray(mask)
        if mode not in MODES:
            raise UserError(f"{path} has colours (mode {mode}): the values of a mask are classes, 255 is ignored")
        if values.shape != wanted[::-1]:
            sizes = f"{values.shape[1]}x{values.shape[0]}, its image {wanted[0]}x{wanted[1]}"
            raise UserError(f"{path} is {sizes}: make them equal")
        return torch.from_numpy(_cropped(values.astype(np.int64), side))


def _mask(folder: Path, name: str) -> Path:
    return folder / PurePosixPath(name).with_suffix(".png")


def _cropped(values: np.ndarray, side: int) -> np.ndarray:
    """Return the values at the pixel centres of `centre_crop`, which scales the shorter side to `side`, then crops."""
    height, width = values.shape
    scale = side / min(height, width)
    rows, columns = (_places(length, max(side, round(length * scale)), side) for length in (height, width))
    return values[np.ix_(rows, columns)]


def _places(length: int, scaled: int, side: int) -> np.ndarray:
    """Return indices in `length` of the centres of the `side` middle ones of `scaled` pixels."""
    first = (scaled - side) // 2
    return ((np.arange(first, first + side) + 0.5) * length / scaled).astype(np.int64)
