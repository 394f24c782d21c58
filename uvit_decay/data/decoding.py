"""Decode image files to uint8 pixels of one size, in the formats and modes that PIL knows.

EXIF orientation and colour profiles are ignored, as in the ADM pipeline, which defines `centre_crop` and the usual
reference statistics for FID, and as in torchvision's ImageFolder.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from uvit_decay.data.archives import DAMAGED
from uvit_decay.runtime.errors import UserError, check_whole, explained

# Formats that PIL may open, whatever the file extension: common ones first, TGA last because it has no signature. The
# others are not images (labels.h5) or run another program on the contents (EPS, and IPTC, which may contain an EPS).
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
FORMATS += ("ICO", "PCX", "QOI", "SGI", "SUN", "XBM", "TGA")
MOST_PIXELS = 89_478_485  # PIL's limit, here for images before and after scaling

Picture = TypeVar("Picture")
Crop = Callable[[Image.Image, int], Image.Image]  # makes an image of any size one of size x size


class Box(NamedTuple):
    """A rectangle of an image, in whole pixels."""

    top: int
    left: int
    height: int
    width: int


@contextmanager
def open_image(file: BinaryIO, name: str) -> Iterator[Image.Image]:
    """Open an image of one of FORMATS without decoding it; the body of the `with` statement may decode it.

    Raises:
        UserError: the image is damaged, also if the body finds that, or has more than MOST_PIXELS pixels. The message
            starts with `name`.
    """
    with explained(name, *DAMAGED, Image.DecompressionBombError):
        try:
            with Image.open(file, formats=formats()) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{image.width}x{image.height}, more than {MOST_PIXELS:,} pixels")
                if image.format == "PNG":
                    _check_pixels(file)
                yield image
        except UnidentifiedImageError:  # PIL's message would show the address of a BytesIO
            raise UserError(f"{name}: not an image that PIL knows (empty, cut short or another kind of file)") from None


def _check_pixels(file: BinaryIO) -> None:
    """Raise a ValueError if pixels of a PNG differ from their CRC-32, which PIL compares for all other parts.

    What follows the pixels may be damaged. Takes 0.05 ms for 256x256, of 1.4 ms of decoding.
    """
    before = file.tell()
    file.seek(8)
    while len(head := file.read(8)) == 8 and head[4:] != b"IEND":
        content, checksum = file.read(int.from_bytes(head[:4])), file.read(4)
        if head[4:] == b"IDAT" and zlib.crc32(content, zlib.crc32(b"IDAT")) != int.from_bytes(checksum):
            raise ValueError("damaged, its pixels are not what was written (CRC-32)")
    file.seek(before)


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Scale the shorter side to `size` and crop the centre to size x size: `center_crop_arr` of ADM (guided-diffusion).

    Box-filtered halvings come first, so that the bicubic filter always shrinks by less than 2. An image of size x size
    is returned unchanged.
    """
    if image.size == (size, size):
        return image
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    x, y = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((x, y, x + size, y + size))


@dataclass(frozen=True)
class ResizedCentre:
    """The Crop that scales the shorter side to round(size / share), bicubic, and takes the centre.

    It is torchvision's Resize and CenterCrop; a `share` of 0.875 makes 224 of 256, the usual test crop of ImageNet.
    """

    share: float

    def __call__(self, image: Picture, size: int) -> Picture:
        """Return the crop of an image, or of each in a uint8 tensor (b, c, h, w), up to a level the same."""
        from torchvision.transforms.v2 import InterpolationMode, functional

        image = functional.resize(image, [self.scaled(size)], InterpolationMode.BICUBIC)
        return functional.center_crop(image, [size, size])

    def scaled(self, size: int) -> int:
        """Return the shorter side before the crop to `size`."""
        return round(size / self.share)


def decode(
    file: BinaryIO, name: str, size: int, channels: int, exact: bool = False, crop: Crop = centre_crop
) -> np.ndarray:
    """Decode an image to uint8 (channels, size, size), cropped by `crop`; 1 channel is grey, 3 are RGB.

    With `exact`, nothing is cropped and the image must have that size. All FORMATS and PIL modes are supported:
    animations give their first frame, transparency is put on white, 16-bit grey and mode I have the range 0..65535,
    float images 0..1. (PIL itself reduces 16-bit colour to the high bytes.)

    Raises:
        UserError: the bytes cannot be decoded, values are outside these ranges, or the size differs with `exact` or
            cannot be scaled to `size`. The message starts with `name`.
    """
    check_shape(size, channels)
    with open_image(file, name) as image:
        width, height = image.size
        if exact and (width, height) != (size, size):
            raise UserError(f"{name}: {width}x{height}, not {size}x{size}: --image-size N crops all to one size")
        if size**2 * max(image.size) > MOST_PIXELS * min(image.size):
            raise UserError(f"{name}: {width}x{height} is too long to be scaled to {size} on its shorter side")
        image.load()
        converted = _eight_bits(image, "L" if channels == 1 else "RGB")
    return planes(converted if exact else crop(converted, size))


def planes(image: Image.Image) -> np.ndarray:
    """Return the pixels of a grey or RGB image, uint8 (channels, height, width)."""
    pixels = np.asarray(image)
    return pixels[None] if image.mode == "L" else pixels.transpose(2, 0, 1)


def decode_box(file: BinaryIO, name: str, size: int, channels: int, choose: Callable[[int, int], Box]) -> Image.Image:
    """Decode an image and scale a part of it to size x size, bicubic with antialiasing, as torchvision's resized_crop.

    A JPEG whose part is at least twice as large as `size` is decoded at 1/2, 1/4 or 1/8 of its size (PIL's draft mode),
    which is faster and changes the pixels slightly; the part keeps at least size x size pixels.

    Args:
        file: the bytes of the image.
        name: its name in errors.
        size: width and height of the result.
        channels: 1 for mode "L", 3 for "RGB".
        choose: returns the part of an image of this height and width.

    Raises:
        UserError: as `decode`.
    """
    check_shape(size, channels)
    with open_image(file, name) as image:
        whole_width, whole_height = image.size
        top, left, height, width = choose(whole_height, whole_width)
        wanted = next(scale for scale in (8, 4, 2, 1) if scale * size <= min(width, height) or scale == 1)
        reduced = image.draft(None, (whole_width // wanted, whole_height // wanted))  # None: not a JPEG
        scale = wanted if reduced else 1
        image.load()
        converted = _eight_bits(image, "L" if channels == 1 else "RGB")
    part = [left / scale, top / scale, (left + width) / scale, (top + height) / scale]
    x, y = math.floor(part[0]), math.floor(part[1])
    # Only this part is scaled: the filter would otherwise reach beyond it
    around = converted.crop((x, y, math.ceil(part[2]), math.ceil(part[3])))
    return around.resize((size, size), Image.Resampling.BICUBIC, (part[0] - x, part[1] - y, part[2] - x, part[3] - y))


def _eight_bits(image: Image.Image, mode: str) -> Image.Image:
    """Convert to `mode` ("L" or "RGB"); raise a ValueError for grey values outside the ranges of `decode`."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        top = 1.0 if image.mode == "F" else 65535
        if not ((values >= 0) & (values <= top)).all():  # NaN too; no clipping, which turns floats 0..255 white
            raise ValueError(f"values {values.min()} to {values.max()} in mode {image.mode}, expected 0 to {top}")
        grey = np.rint(values * (255 / top)).astype(np.uint8)
        if "transparency" in image.info:  # PNG: the one grey value that is transparent
            grey[values == image.info["transparency"]] = 255
        return Image.fromarray(grey).convert(mode)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


@cache
def formats() -> list[str]:
    """Load PIL's plugins, common ones first (a third faster on CIFAR-10), and return the available FORMATS."""
    Image.preinit()
    Image.init()
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such images are refused
    return [name for name in FORMATS if name in Image.OPEN]


def check_shape(size: int, channels: int) -> None:
    if channels not in (1, 3):
        raise UserError(f"images have 1 channel (grey) or 3 (RGB), not {channels}")
    check_whole(1, math.isqrt(MOST_PIXELS), **{"the size of images": size})
