"""Decode image files to uint8 pixels of one size, in the formats and modes that PIL supports.

EXIF orientation and colour profiles are ignored, as in torchvision's ImageFolder and in the ADM pipeline, which defines
`centre_crop` and the usual reference statistics for FID.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Annotated, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from uvit_decay.data.archives import DAMAGED
from uvit_decay.files.writing import PAGE, check_content
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.typed import Bounds, check_types

# Formats that PIL may open, whatever the file extension: common ones first, TGA last because it has no signature. Other
# formats are not images (labels.h5) or run another program on the contents (EPS, and IPTC, which may contain an EPS).
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
FORMATS += ("ICO", "PCX", "QOI", "SGI", "SUN", "XBM", "HEIF", "TGA")
MOST_PIXELS = 89_478_485  # PIL's limit, here for images before and after scaling

Side = Annotated[int, Bounds(1, math.isqrt(MOST_PIXELS))]  # of a square image
Channels = Literal[1, 3]  # grey, or RGB
Picture = TypeVar("Picture")
Crop = Callable[[Image.Image, int], Image.Image]  # scales and crops an image to size x size


@dataclass(frozen=True)
class Reading:
    """The conversion of the values in an image file to grey or RGB of 8 bits.

    Args:
        white: the value that becomes 255 in grey images of more than 8 bits; None: 65,535, and 1 for float images.
        on_white: put transparent images on white. Otherwise transparency is dropped, so that the stored colours show,
            as torch-fidelity, pytorch-fid and clean-fid read them (PIL's convert("RGB")).
    """

    white: float | None = None
    on_white: bool = True

    @property
    def key(self) -> str:
        """The difference from the default, for hashes of images; empty for the default, the only one up to 72e8659."""
        return "" if self == Reading() else repr(self)


AS_TRAINED = Reading()


class Box(NamedTuple):
    """A rectangle of an image, in whole pixels."""

    top: int
    left: int
    height: int
    width: int


ChooseBox = Callable[[int, int], Box]  # returns a part of an image of a height and a width


@contextmanager
def open_image(file: BinaryIO, name: str) -> Iterator[Image.Image]:
    """Open an image of one of FORMATS without decoding it; the body of the `with` statement may decode it.

    Raises:
        UserError: the image is damaged, which may first show in the body, has more than MOST_PIXELS pixels, or is a
            placeholder, see `check_content`. The message starts with `name`.
    """
    with explain(name, *DAMAGED, Image.DecompressionBombError):
        check_content(name, file.read(PAGE))
        file.seek(0)
        try:
            with Image.open(file, formats=formats()) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{image.width}x{image.height}, more than {MOST_PIXELS:,} pixels")
                if image.format == "PNG":
                    _check_pixels(file)
                yield image
        except UnidentifiedImageError:  # PIL's message would show the address of a BytesIO
            reason = "not an image that PIL can read; it is empty, cut short or another kind of file"
            raise UserError(f"{name}: {reason}") from None


def _check_pixels(file: BinaryIO) -> None:
    """Raise a ValueError if pixels of a PNG differ from their CRC-32, which PIL compares for all other parts.

    Damage after the pixels is ignored. It takes 0.05 ms for 256x256, of 1.4 ms of decoding.
    """
    before = file.tell()
    file.seek(8)  # behind the signature
    while True:
        head = file.read(8)
        length, kind = head[:4], head[4:]
        if len(head) < 8 or kind == b"IEND":
            break
        content = file.read(int.from_bytes(length))
        checksum = file.read(4)
        if kind == b"IDAT" and zlib.crc32(content, zlib.crc32(kind)) != int.from_bytes(checksum):
            raise ValueError("damaged, the pixels do not match their checksum (CRC-32)")
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
    scaled_size = (round(image.width * scale), round(image.height * scale))
    image = image.resize(scaled_size, Image.Resampling.BICUBIC)
    x = (image.width - size) // 2
    y = (image.height - size) // 2
    return image.crop((x, y, x + size, y + size))


@dataclass(frozen=True)
class ResizedCentre:
    """The Crop that scales the shorter side to round(size / share), bicubic, and takes the centre.

    It is torchvision's Resize and CenterCrop; a `share` of 0.875 makes 224 of 256, the usual test crop of ImageNet.
    """

    share: float

    def __call__(self, image: Picture, size: int) -> Picture:
        """Return the crop of an image, or of each image in a uint8 tensor (b, c, h, w); they differ by one level."""
        from torchvision.transforms.v2 import InterpolationMode, functional

        image = functional.resize(image, [self.shorter_side(size)], InterpolationMode.BICUBIC)
        return functional.center_crop(image, [size, size])

    def shorter_side(self, size: int) -> int:
        """Return the shorter side of the scaled image, before the crop to `size`."""
        return round(size / self.share)


@check_types
@dataclass(frozen=True)
class Decoding:
    """The conversion of an image in a file to uint8 (channels, size, size).

    Args:
        size: width and height of the result.
        channels: 1 for grey, 3 for RGB.
        exact: crop nothing, and require this size.
        crop: the crop to `size`.
        reading: how its values become 8 bits.
    """

    size: Side
    channels: Channels
    exact: bool = False
    crop: Crop = centre_crop
    reading: Reading = AS_TRAINED


def decode(file: BinaryIO, name: str, decoding: Decoding) -> np.ndarray:
    """Decode an image to uint8 (channels, size, size).

    All FORMATS and PIL modes are supported: animations give their first frame, transparency becomes white, 16-bit grey
    and mode I have the range 0..65535, float images 0..1; `reading` may change this. PIL itself reduces 16-bit colour
    to the high bytes.

    Args:
        file: the bytes of the image.
        name: its name in errors.
        decoding: size, channels and crop of the result.

    Raises:
        UserError: the bytes cannot be decoded, values are outside these ranges, or the size differs with `exact` or
            cannot be scaled to `size`. The message starts with `name`.
    """
    size = decoding.size
    with open_image(file, name) as image:
        width, height = image.size
        if decoding.exact:
            check_size(image, name, size)
        if size**2 * max(image.size) > MOST_PIXELS * min(image.size):
            raise UserError(f"{name}: {width}x{height} is too long to be scaled to {size} on its shorter side")
        image.load()
        converted = _convert(image, decoding.channels, decoding.reading)
    if not decoding.exact:
        converted = decoding.crop(converted, size)
    return planes(converted)


def check_size(image: Image.Image, name: str, size: int) -> None:
    """Raise a UserError unless an image is size x size."""
    width, height = image.size
    if (width, height) != (size, size):
        hint = "to crop all images to one size, set `image_size`"
        raise UserError(f"{name}: {width}x{height}, not {size}x{size}; {hint}")


def check_image(file: BinaryIO, name: str, reading: Reading = AS_TRAINED) -> None:
    """Decode an image and forget it; raise a UserError as `decode` does if that is impossible at any size."""
    with open_image(file, name) as image:
        image.load()
        _convert(image, 3, reading)


def planes(image: Image.Image) -> np.ndarray:
    """Return the pixels of a grey or RGB image, uint8 (channels, height, width)."""
    pixels = np.asarray(image)
    if image.mode == "L":
        return pixels[None]
    return pixels.transpose(2, 0, 1)


def decode_box(file: BinaryIO, name: str, decoding: Decoding, choose: ChooseBox) -> Image.Image:
    """Decode an image and scale a part of it to size x size, bicubic with antialiasing, as torchvision's resized_crop.

    A JPEG whose part is at least twice as large as `size` is decoded at 1/2, 1/4 or 1/8 of its size (PIL's draft mode),
    which is faster and changes the pixels slightly; the part keeps at least size x size pixels.

    Args:
        file: the bytes of the image.
        name: its name in errors.
        decoding: size and channels (1: mode "L", 3: "RGB") of the result; its crop is not used.
        choose: returns the part of an image of this height and width.
    """
    size = decoding.size
    with open_image(file, name) as image:
        whole_width, whole_height = image.size
        top, left, height, width = choose(whole_height, whole_width)
        scale = 8
        while scale > 1 and scale * size > min(width, height):
            scale //= 2
        reduced = image.draft(None, (whole_width // scale, whole_height // scale))  # None: not a JPEG
        if not reduced:
            scale = 1
        image.load()
        converted = _convert(image, decoding.channels, decoding.reading)
    x_start, x_end = left / scale, (left + width) / scale
    y_start, y_end = top / scale, (top + height) / scale
    x, y = math.floor(x_start), math.floor(y_start)
    # Only this part is scaled: otherwise the filter would reach beyond it.
    around = converted.crop((x, y, math.ceil(x_end), math.ceil(y_end)))
    part = (x_start - x, y_start - y, x_end - x, y_end - y)
    return around.resize((size, size), Image.Resampling.BICUBIC, part)


def _convert(image: Image.Image, channels: int, reading: Reading) -> Image.Image:
    """Convert to grey or RGB of 8 bits; raise a ValueError for grey values outside the ranges of `decode`."""
    mode = "L" if channels == 1 else "RGB"
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _reduce_levels(image, reading).convert(mode)
    if image.has_transparency_data and reading.on_white:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    if image.mode == "LAB":  # PIL converts it to RGB alone
        image = image.convert("RGB")
    if image.mode != mode:
        image = image.convert(mode)
    return image


def _reduce_levels(image: Image.Image, reading: Reading) -> Image.Image:
    """Convert grey values of 16 or 32 bits to 8 bits."""
    values = np.asarray(image)
    top = reading.white
    if top is None:
        top = 1.0 if image.mode == "F" else 65535
    inside = (values >= 0) & (values <= top)  # False for NaN
    if not inside.all():  # clipping would turn floats 0..255 white
        found = f"values {values.min()} to {values.max()} in mode {image.mode}, expected 0 to {top}"
        if values.min() < 0:
            raise ValueError(f"{found}; shift and scale the values of all images to 0 to {65535 if top > 1 else 1}")
        raise ValueError(f"{found}; `white` is the value of white")
    grey = np.rint(values * (255 / top)).astype(np.uint8)
    if "transparency" in image.info and reading.on_white:  # PNG: the one grey value that is transparent
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey)


@cache
def formats() -> list[str]:
    """Load PIL's plugins, common ones first (a third faster on CIFAR-10), and return the available FORMATS."""
    Image.preinit()
    Image.init()
    if find_spec("pillow_heif") is not None:  # for HEIF, the format of telephones' pictures (.heic)
        with explain("pillow-heif is installed but cannot be imported", ImportError, OSError):
            from pillow_heif import register_heif_opener
        register_heif_opener()
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such images are refused
    return [name for name in FORMATS if name in Image.OPEN]
