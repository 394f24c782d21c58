"""Segmentation masks of images: PNGs of the same names that contain class numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor

from uvit_decay.data.decoding import open_image
from uvit_decay.data.image_files import Listing
from uvit_decay.runtime.errors import UserError

MODES = ("L", "P", "1", "I", "I;16")  # of PIL; with a palette (P), the indices are the classes


@dataclass(frozen=True)
class Masks:
    """Masks in `folder` of the images in `listing`; `members` are the indices of the images that have one."""

    folder: Path
    listing: Listing
    members: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path, listing: Listing) -> Masks:
        """Find the masks of images: cat/07.jpg has the mask cat/07.png.

        Raises:
            UserError: no such folder, or no mask in it.
        """
        if not folder.is_dir():
            raise UserError(f"--masks {folder}: no such folder")
        members = []
        for i, name in enumerate(listing.members):
            if _mask_path(folder, name).is_file():
                members.append(i)
        if not members:
            first = _mask_path(folder, listing.members[0])
            raise UserError(f"--masks {folder}: no image has a mask there; the mask of the first one would be {first}")
        return cls(folder, listing, tuple(members))

    def read(self, indices: Sequence[int], side: int) -> Int64[Tensor, "n side side"]:
        """Read the masks of the images at `indices`, cropped as the images are, by nearest pixels.

        Raises:
            UserError: a mask cannot be read, has colours instead of classes, or another size than its image.
        """
        with self.listing.open() as fetch:
            masks = [self._read_mask(i, fetch, side) for i in indices]
        return torch.stack(masks)

    def _read_mask(self, index: int, fetch: Callable[[int], BytesIO], side: int) -> Int64[Tensor, "side side"]:
        """Read the mask of one image; `fetch` returns the bytes of the image, for its size."""
        name = self.listing.members[index]
        path = _mask_path(self.folder, name)
        with open_image(fetch(index), name) as image:
            size = image.size
        with path.open("rb") as file, open_image(file, str(path)) as mask:
            if mask.mode not in MODES:
                raise UserError(f"{path} has colours (mode {mask.mode}); give masks whose values are classes")
            if mask.size != size:
                raise UserError(f"{path} has the size {mask.size}, its image {size}; give masks of the images' size")
            return torch.from_numpy(_crop(mask, side))


def _mask_path(folder: Path, name: str) -> Path:
    return folder / PurePosixPath(name).with_suffix(".png")


def _crop(mask: Image.Image, side: int) -> np.ndarray:
    """Scale the shorter side to `side` by nearest pixels, then crop, as `centre_crop` does with images."""
    scale = side / min(mask.size)
    width = max(side, round(mask.width * scale))
    height = max(side, round(mask.height * scale))
    left = (width - side) // 2
    top = (height - side) // 2
    values = np.asarray(mask.resize((width, height), Image.Resampling.NEAREST))
    return values[top : top + side, left : left + side].astype(np.int64)
