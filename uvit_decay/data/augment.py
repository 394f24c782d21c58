"""Random changes of training images: crop, mirror image, RandAugment and erasing, as functions of (seed, row).

A row is the position of an image in the whole run (`Batch.sample_ids`), so that the changes do not depend on the number
of processes, micro-batches or reader processes, and a resumed run continues with the same ones.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from uvit_decay.data.decoding import Box
from uvit_decay.runtime.errors import UserError, check_numbers
from uvit_decay.runtime.random import normal, uniform

_ATTEMPTS = 10  # of finding a box that fits, in torchvision and timm
_ERASED_SHARE, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)  # of timm's RandomErasing
# timm leaves out sections and sets of operations that it does not know
_RAND_AUGMENT = re.compile(
    r"rand(-(m\d+|n[1-9]\d*|mstd\d+(\.\d+)?|mmax[1-9]\d*|p[01](\.\d+)?|inc[01]|tweights|t3aw?))*"
)


@dataclass(frozen=True)
class Augment:
    """Random changes of a training image; the defaults are those of MAE's pre-training.

    Args:
        crop_scale: least and largest share of the area that is cropped, in (0, 1]; torchvision's default is 0.08, 1.
        crop_ratio: least and largest width / height of a crop.
        flip: mirror half of the images.
        rand_augment: timm's name of a RandAugment, such as `rand-m9-mstd0.5-inc1` for fine-tuning; null for none.
        erase: share of images, in [0, 1], of which a rectangle is replaced by noise, one number a channel and pixel.
        crop_clip: a crop that does not fit into the image is clipped, as in MAE's linear probe; otherwise another one
            is drawn, up to ten times, as torchvision does.
    """

    crop_scale: tuple[float, float] = (0.2, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    rand_augment: str | None = None
    erase: float = 0.0
    crop_clip: bool = False

    def __post_init__(self) -> None:
        ranges = {"crop_scale": (self.crop_scale, "(0, 1]"), "crop_ratio": (self.crop_ratio, "(0, inf)")}
        for name, ((low, high), interval) in ranges.items():
            check_numbers(interval, **{f"the least {name}": low, f"the largest {name}": high})
            if low > high:
                raise UserError(f"{name} is the least and the largest, got {low}, {high}")
        check_numbers("[0, 1]", erase=self.erase)
        if self.rand_augment is not None and not _RAND_AUGMENT.fullmatch(self.rand_augment):
            raise UserError(f"rand_augment {self.rand_augment!r} is none of timm's, such as rand-m9-mstd0.5-inc1")

    def draws(self, seed: int, rows: Tensor) -> list[AugmentDraw]:
        """Return what is drawn for the images at these rows, int64 (b,) on the CPU."""
        boxes = uniform("crop", seed, rows=rows, shape=(_ATTEMPTS, 4)).tolist()
        mirror = (uniform("flip", seed, rows=rows) < 0.5 * self.flip).tolist()
        words = (uniform("rand_augment", seed, rows=rows, shape=(2,)) * 2**24).long().tolist()
        return [AugmentDraw(self, *drawn) for drawn in zip(boxes, mirror, words, strict=True)]


class AugmentDraw(NamedTuple):
    """The random numbers of one image: (10, 4) for the crop, whether it is mirrored, and seeds of RandAugment."""

    augment: Augment
    attempts: list[list[float]]
    mirror: bool
    seeds: list[int]

    def box(self, height: int, width: int) -> Box:
        """Return the crop of an image of this size: `RandomResizedCrop.get_params` of torchvision, or of MAE's code.

        Without a box that fits, it is the largest one at the centre whose ratio is allowed.
        """
        scale, ratio = self.augment.crop_scale, self.augment.crop_ratio
        if self.augment.crop_clip:
            h, w = _size(self.attempts[0], scale, ratio, height * width)
            return _placed(self.attempts[0], max(1, min(h, height)), max(1, min(w, width)), height, width)
        box = _first_fitting(self.attempts, scale, ratio, height, width)
        if box is not None:
            return box
        h = min(height, max(1, round(width / ratio[0])))
        w = min(width, max(1, round(height * ratio[1])))
        return Box((height - h) // 2, (width - w) // 2, h, w)


Attempt = Sequence[float]  # four in [0, 1): share of the area, logarithm of the ratio, place from the top and the left
Range = tuple[float, float]


def _first_fitting(
    attempts: Sequence[Attempt], scale: Range, ratio: Range, height: int, width: int, smaller: int = 0
) -> Box | None:
    """Return the first box that is at least `smaller` pixels smaller than the image, None if there is none."""
    for attempt in attempts:
        h, w = _size(attempt, scale, ratio, height * width)
        if 0 < w <= width - smaller and 0 < h <= height - smaller:
            return _placed(attempt, h, w, height, width)
    return None


def _size(attempt: Attempt, scale: Range, ratio: Range, pixels: int) -> tuple[int, int]:
    """Return height and width of the box of an attempt in an image of so many pixels."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    area = pixels * (scale[0] + (scale[1] - scale[0]) * attempt[0])
    wide = math.exp(low + (high - low) * attempt[1])
    return round(math.sqrt(area / wide)), round(math.sqrt(area * wide))


def _placed(attempt: Attempt, h: int, w: int, height: int, width: int) -> Box:
    """Return the box of height h and width w at the place of an attempt, in an image that it fits into."""
    return Box(int(attempt[2] * (height - h + 1)), int(attempt[3] * (width - w + 1)), h, w)


@cache
def rand_augment(name: str, size: int, channels: int) -> Callable[[Image.Image], Image.Image]:
    """Return timm's RandAugment of size x size images, as its `create_transform` for bicubic makes it.

    It draws from the global generators: see `seeded`.
    """
    from timm.data import auto_augment

    mean = tuple(round(255 * value) for value in imagenet_statistics(channels)[0])
    fill = mean if channels == 3 else mean[0]
    options = {"translate_const": int(size * 0.45), "img_mean": fill, "interpolation": Image.Resampling.BICUBIC}
    change = auto_augment.rand_augment_transform(name, options)
    for operation in change.ops:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return change


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Keep `bits` bits of each value: timm's posterize, which fails at 0 bits, black, since Pillow 13 refuses them."""
    return image.point([value & (256 - 2 ** (8 - bits)) for value in range(256)] * len(image.getbands()))


@contextmanager
def seeded(seeds: Sequence[int]) -> Iterator[None]:
    """Seed the global generators of Python and numpy with these two numbers in the body, and restore them."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  timm's generator
    random.seed(seeds[0])
    np.random.seed(seeds[1])  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@cache
def imagenet_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of ImageNet's channels in [0, 1], for one channel their average."""
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    if channels == 3:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    return (sum(IMAGENET_DEFAULT_MEAN) / 3,), (sum(IMAGENET_DEFAULT_STD) / 3,)


def erased(images: Tensor, share: float, seed: int, rows: Tensor) -> Tensor:
    """Return images of which this share has a rectangle of noise, normal in the scale of ImageNet's mean and deviation.

    This is timm's RandomErasing in mode pixel with one rectangle, of 2 % to 1/3 of the area.

    Args:
        images: float32 (b, c, h, w), about [-1, 1].
        share: share of images, in [0, 1].
        seed: random seed.
        rows: positions of the images in the run, int64 (b,) on the CPU.
    """
    height, width = images.shape[2:]
    numbers = uniform("erase", seed, rows=rows, shape=(1 + 4 * _ATTEMPTS,))
    attempts = numbers[:, 1:].unflatten(1, (_ATTEMPTS, 4)).tolist()
    found = [_first_fitting(tries, _ERASED_SHARE, _ERASED_RATIO, height, width, smaller=1) for tries in attempts]
    chosen = [i for i, box in enumerate(found) if box is not None and numbers[i, 0] < share]
    if not chosen:
        return images
    keys = rows[chosen].to(images.device, non_blocking=True)
    noise = normal("erase", seed, rows=keys, shape=images.shape[1:])
    statistics = torch.tensor(imagenet_statistics(images.shape[1]), dtype=images.dtype)
    mean, deviation = statistics.to(images.device, non_blocking=True)[..., None, None]
    images = images.clone()
    for i, pixels in zip(chosen, noise * (2 * deviation) + (2 * mean - 1), strict=True):
        top, left, h, w = found[i]
        part = slice(top, top + h), slice(left, left + w)
        images[i, :, *part] = pixels[:, *part]
    return images
