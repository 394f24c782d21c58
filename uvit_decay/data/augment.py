"""Random changes of training images: crop, mirror image, RandAugment, shift and erasing, as functions of (seed, row).

A row is the position of an image in the whole run (`Batch.sample_ids`). The changes therefore do not depend on the
number of processes, micro-batches or reader processes, and a resumed run continues with the same changes.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from uvit_decay.data.decoding import Box
from uvit_decay.runtime.random import normal, uniform
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, Share, Within, check_types

_ATTEMPTS = 10  # to find a box that fits, as in torchvision and timm
_ERASED_SHARE = (0.02, 1 / 3)  # of the area, in timm's RandomErasing
_ERASED_RATIO = (0.3, 1 / 0.3)  # width / height, in timm's RandomErasing
# timm ignores unknown sections and sets of operations
_RAND_AUGMENT = re.compile(
    r"rand(-(m\d+|n[1-9]\d*|mstd\d+(\.\d+)?|mmax[1-9]\d*|p[01](\.\d+)?|inc[01]|tweights|t3aw?))*"
)


Attempt = Sequence[float]  # four in [0, 1): share of the area, logarithm of the ratio, place from the top and the left
Range = tuple[float, float]
Pixels = TypeVar("Pixels", Tensor, np.ndarray)


@check_types
@dataclass(frozen=True)
class Augment:
    """Random changes of a training image; the defaults are the settings of MAE's pre-training.

    Args:
        crop_scale: least and largest share of the area that is cropped, in (0, 1]; torchvision's default is 0.08, 1.
        crop_ratio: least and largest width / height of a crop.
        flip: mirror half of the images.
        rand_augment: timm's name of a RandAugment, such as `rand-m9-mstd0.5-inc1` for fine-tuning; null for none.
        erase: share of images, in [0, 1], in which a rectangle is replaced by noise, drawn per channel and pixel.
        crop_clip: clip a crop that does not fit into the image, as in MAE's linear probe; otherwise another crop is
            drawn, up to ten times, as in torchvision.
        shift: pixels, at least 0 and fewer than the image has, by which the cropped image is moved at most, vertically
            and horizontally; its mirror image fills the border. CIFAR is usually moved by 4, with crop_scale 1, 1.
    """

    crop_scale: Annotated[Range, Within("(0, 1]")] = (0.2, 1.0)
    crop_ratio: Annotated[Range, Within("(0, inf)")] = (3 / 4, 4 / 3)
    flip: bool = True
    rand_augment: str | None = None
    erase: Share = 0.0
    crop_clip: bool = False
    shift: Annotated[int, Bounds(0, 2**16)] = 0

    def __post_init__(self) -> None:
        if self.rand_augment is not None and not _RAND_AUGMENT.fullmatch(self.rand_augment):
            example = "give a name of timm, such as rand-m9-mstd0.5-inc1"
            raise UserError(f"{self.rand_augment!r} is not a RandAugment of timm; {example}", argument="rand_augment")

    def draws(self, seed: int, rows: Tensor) -> list[AugmentDraw]:
        """Return the random numbers of the images at these rows, int64 (b,) on the CPU."""
        crops = uniform("crop", seed, rows=rows, shape=(_ATTEMPTS, 4)).tolist()
        mirrors = (uniform("flip", seed, rows=rows) < 0.5 * self.flip).tolist()
        words = uniform("rand_augment", seed, rows=rows, shape=(2,)) * 2**24
        moves = torch.zeros(len(rows), 2)
        if self.shift:
            moves = uniform("shift", seed, rows=rows, shape=(2,)) * (2 * self.shift + 1) - self.shift
        draws = []
        numbers = zip(crops, mirrors, words.long().tolist(), moves.floor().int().tolist(), strict=True)
        for attempts, mirror, seeds, (down, right) in numbers:
            draws.append(AugmentDraw(self, attempts, mirror, seeds, (down, right)))
        return draws


class AugmentDraw(NamedTuple):
    """The random numbers of one image: (10, 4) for the crop, whether it is mirrored, seeds of RandAugment, the shift.

    The shift is in pixels, down and to the right.
    """

    augment: Augment
    attempts: list[list[float]]
    mirror: bool
    seeds: list[int]
    shift: tuple[int, int] = (0, 0)

    def box(self, height: int, width: int) -> Box:
        """Return the crop of an image of this size: `RandomResizedCrop.get_params` of torchvision, or of MAE's code.

        If no attempt fits, it is the largest box at the centre whose ratio is allowed.
        """
        scale, ratio = self.augment.crop_scale, self.augment.crop_ratio
        if self.augment.crop_clip:
            first = self.attempts[0]
            h, w = _size(first, scale, ratio, height * width)
            h = max(1, min(h, height))
            w = max(1, min(w, width))
            return _place(first, h, w, height, width)
        box = _first_fitting(self.attempts, scale, ratio, height, width)
        if box is not None:
            return box
        least_ratio, largest_ratio = ratio
        h = min(height, max(1, round(width / least_ratio)))
        w = min(width, max(1, round(height * largest_ratio)))
        return Box((height - h) // 2, (width - w) // 2, h, w)

    def moved(self, pixels: Pixels) -> Pixels:
        """Return an image (c, h, w), tensor or array, moved by the shift; its mirror image fills the border."""
        if self.shift == (0, 0):
            return pixels
        down, right = self.shift
        rows = _mirrored(pixels.shape[1], down)
        columns = _mirrored(pixels.shape[2], right)
        return pixels[:, rows][:, :, columns]


def _mirrored(size: int, shift: int) -> list[int]:
    """Return the positions that are read along an axis: a position outside is mirrored at the first or last pixel."""
    last = size - 1
    positions = []
    for i in range(size):
        distance = abs(i - shift)
        positions.append(last - abs(last - distance))
    return positions


def _first_fitting(
    attempts: Sequence[Attempt], scale: Range, ratio: Range, height: int, width: int, smaller: int = 0
) -> Box | None:
    """Return the first box that is at least `smaller` pixels smaller than the image; None if there is none."""
    for attempt in attempts:
        h, w = _size(attempt, scale, ratio, height * width)
        if 0 < w <= width - smaller and 0 < h <= height - smaller:
            return _place(attempt, h, w, height, width)
    return None


def _size(attempt: Attempt, scale: Range, ratio: Range, pixels: int) -> tuple[int, int]:
    """Return height and width of the box of an attempt, in an image of this number of pixels."""
    share, log_ratio, _, _ = attempt
    low, high = map(math.log, ratio)
    least_share, largest_share = scale
    area = pixels * (least_share + (largest_share - least_share) * share)
    wide = math.exp(low + (high - low) * log_ratio)
    return round(math.sqrt(area / wide)), round(math.sqrt(area * wide))


def _place(attempt: Attempt, h: int, w: int, height: int, width: int) -> Box:
    """Return the box of height h and width w at the place of an attempt, in an image that contains it."""
    _, _, top, left = attempt
    y = int(top * (height - h + 1))
    x = int(left * (width - w + 1))
    return Box(y, x, h, w)


@cache
def rand_augment(name: str, size: int, channels: int) -> Callable[[Image.Image], Image.Image]:
    """Return timm's RandAugment for size x size images, with the settings of its `create_transform` for bicubic.

    It draws from the global generators: see `global_seeds`.
    """
    from timm.data import auto_augment

    mean, _ = imagenet_statistics(channels)
    levels = tuple(round(255 * value) for value in mean)
    fill = levels if channels == 3 else levels[0]
    options = {"translate_const": int(size * 0.45), "img_mean": fill, "interpolation": Image.Resampling.BICUBIC}
    change = auto_augment.rand_augment_transform(name, options)
    for operation in change.ops:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return change


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Keep `bits` bits of each value; timm's posterize fails at 0 bits (black), which Pillow 13 refuses."""
    mask = 256 - 2 ** (8 - bits)
    table = [value & mask for value in range(256)]
    return image.point(table * len(image.getbands()))


@contextmanager
def global_seeds(seeds: Sequence[int]) -> Iterator[None]:
    """Seed the global generators of Python and numpy with these two numbers in the body, and restore them after it."""
    python_seed, numpy_seed = seeds
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002  timm's generator
    random.seed(python_seed)
    np.random.seed(numpy_seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


@cache
def imagenet_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of ImageNet's channels in [0, 1]; one channel has the average of three."""
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    if channels == 3:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    return (sum(IMAGENET_DEFAULT_MEAN) / 3,), (sum(IMAGENET_DEFAULT_STD) / 3,)


def erase_boxes(images: Tensor, share: float, seed: int, rows: Tensor) -> Tensor:
    """Return the images, a share of them with a rectangle of noise, normal with ImageNet's mean and deviation.

    This is timm's RandomErasing in mode pixel with one rectangle, of 2 % to 1/3 of the area.

    Args:
        images: float32 (b, c, h, w), about [-1, 1].
        share: share of images with a rectangle, in [0, 1].
        seed: random seed.
        rows: positions of the images in the run, int64 (b,) on the CPU.
    """
    # All attempts are drawn on the CPU, where the boxes are needed as numbers: nothing waits for the device.
    height, width = images.shape[2:]
    numbers = uniform("erase", seed, rows=rows, shape=(1 + 4 * _ATTEMPTS,))
    selected = (numbers[:, 0] < share).tolist()
    attempts = numbers[:, 1:].unflatten(1, (_ATTEMPTS, 4)).tolist()
    boxes: dict[int, Box] = {}
    for i in range(len(images)):
        if selected[i]:
            box = _first_fitting(attempts[i], _ERASED_SHARE, _ERASED_RATIO, height, width, smaller=1)
            if box is not None:
                boxes[i] = box
    if not boxes:
        return images
    keys = rows[list(boxes)].to(images.device, non_blocking=True)
    noise = normal("erase", seed, rows=keys, shape=images.shape[1:])
    statistics = torch.tensor(imagenet_statistics(images.shape[1]), dtype=images.dtype)
    mean, deviation = statistics.to(images.device, non_blocking=True)[..., None, None]
    noise = noise * (2 * deviation) + (2 * mean - 1)
    images = images.clone()
    for i, pixels in zip(boxes, noise, strict=True):
        box = boxes[i]
        vertical = slice(box.top, box.top + box.height)
        horizontal = slice(box.left, box.left + box.width)
        images[i, :, vertical, horizontal] = pixels[:, vertical, horizontal]
    return images
