"""Decoding one image: modes, transparency, depths, the crop, and what is refused before it takes all memory."""

import io
import struct
import zlib

import numpy as np
import pytest
from image_noise import SIZE, noise
from PIL import Image
from refusals import raises_user_error

from uvit_decay.data.decoding import AS_TRAINED, Decoding, Reading, decode, formats


def saved(image: Image.Image, kind: str, **options: object) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def decoded(
    image: Image.Image, kind: str = "PNG", channels: int = 3, reading: Reading = AS_TRAINED, **options: object
) -> np.ndarray:
    return decode(saved(image, kind, **options), "x", Decoding(SIZE, channels, reading=reading))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b"") -> io.BytesIO:
    """Return a PNG written byte by byte, for what PIL cannot write. `rows` includes the filter bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"tRNS", extra) if extra else b""
    return io.BytesIO(b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def test_rgb_is_exact_and_grey_is_rec601():
    pixels = noise(SIZE, SIZE, 3)
    image = Image.fromarray(pixels)
    assert (decoded(image) == pixels.transpose(2, 0, 1)).all()
    grey = decoded(image, channels=1)
    assert grey.shape == (1, SIZE, SIZE)
    assert grey.dtype == np.uint8
    assert np.abs(grey[0] - pixels @ np.array([0.299, 0.587, 0.114])).max() <= 0.51


@pytest.mark.parametrize("kind", ["BMP", "GIF", "PNG", "PPM", "TGA", "TIFF", "WEBP"])
def test_grey_in_every_lossless_format(kind):
    pixels = noise(SIZE, SIZE)
    options = {"lossless": True} if kind == "WEBP" else {}
    grey = decoded(Image.fromarray(pixels), kind, channels=1, **options)
    assert (grey[0] == pixels).all()
    assert (decoded(Image.fromarray(pixels), kind, channels=3, **options) == pixels).all()


def test_one_bit():
    bits = noise(SIZE, SIZE) > 127
    assert (decoded(Image.fromarray(bits), channels=1)[0] == 255 * bits).all()


def test_palette():
    indices = noise(SIZE, SIZE) % 4
    palette = noise(4, 3, seed=1)
    image = Image.fromarray(indices)
    image.putpalette(palette.tobytes())
    assert image.mode == "P"
    assert (decoded(image) == palette[indices].transpose(2, 0, 1)).all()
    # one transparent entry, then one alpha for each
    white = np.where((indices == 2)[..., None], 255, palette[indices])
    assert (decoded(image, transparency=2) == white.transpose(2, 0, 1)).all()
    alphas = np.array([0, 255, 255, 0])
    white = np.where((alphas[indices] == 0)[..., None], 255, palette[indices])
    assert (decoded(image, transparency=bytes(alphas.tolist())) == white.transpose(2, 0, 1)).all()


def test_half_transparent_red_is_pink_and_hidden_colours_do_not_show():
    assert (decoded(Image.new("RGBA", (SIZE, SIZE), (255, 0, 0, 128)))[:, 0, 0] == (255, 127, 127)).all()
    assert (decoded(Image.new("RGBA", (SIZE, SIZE), (9, 0, 0, 0))) == 255).all()
    # composited before it is scaled: the hidden black must not darken the seam
    image = Image.new("RGBA", (4 * SIZE, 4 * SIZE), (255, 255, 255, 255))
    image.paste((0, 0, 0, 0), (0, 0, 2 * SIZE + 1, 4 * SIZE))
    assert (decoded(image) == 255).all()


def test_grey_with_alpha():
    pixels, alpha = noise(SIZE, SIZE), noise(SIZE, SIZE, seed=1)
    image = Image.merge("LA", (Image.fromarray(pixels), Image.fromarray(alpha)))
    expected = 255 + (pixels.astype(float) - 255) * alpha / 255
    for channels in (1, 3):
        assert np.abs(decoded(image, channels=channels) - expected).max() <= 1


def test_transparent_colour_of_grey_and_rgb():
    pixels = noise(SIZE, SIZE) % 4
    assert (decoded(Image.fromarray(pixels), channels=1, transparency=3)[0] == np.where(pixels == 3, 255, pixels)).all()
    image = Image.new("RGB", (SIZE, SIZE), (1, 2, 3))
    assert (decoded(image, transparency=(1, 2, 3)) == 255).all()
    assert (decoded(image, transparency=(1, 2, 4))[:, 0, 0] == (1, 2, 3)).all()


def test_cmyk():
    cmyk = Image.new("CMYK", (SIZE, SIZE), (255, 0, 0, 0))
    assert np.abs(decoded(cmyk, "TIFF")[:, 0, 0].astype(int) - (0, 255, 255)).max() == 0
    assert np.abs(decoded(cmyk, "JPEG", quality=95)[:, 0, 0].astype(int) - (0, 255, 255)).max() <= 2
    black = Image.new("CMYK", (SIZE, SIZE), (0, 0, 0, 255))
    assert (decoded(black, "TIFF", channels=1) == 0).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_is_divided_by_257_and_rounded(kind):
    values = np.linspace(0, 65535, SIZE * SIZE).round().astype(np.uint16).reshape(SIZE, SIZE)
    expected = np.array([[round(int(v) / 257) for v in row] for row in values])
    assert (expected != values >> 8).any()
    for channels in (1, 3):
        assert (decoded(Image.fromarray(values), kind, channels=channels) == expected).all()


def test_big_endian_sixteen_bit_and_mode_i():
    values = np.linspace(0, 65535, SIZE * SIZE).round().astype(np.uint16).reshape(SIZE, SIZE)
    expected = (values.astype(int) + 128) // 257
    big = Image.frombytes("I;16B", (SIZE, SIZE), values.astype(">u2").tobytes())
    assert (decoded(big, "TIFF", channels=1)[0] == expected).all()
    assert (decoded(Image.fromarray(values.astype(np.int32)), "TIFF", channels=1)[0] == expected).all()
    with raises_user_error("x", "0 to 65536", "mode I", "0 to 65535"):
        decoded(Image.fromarray(np.array([[0, 65536]], dtype=np.int32)), "TIFF")


def test_sixteen_bit_png_with_transparency_and_colour():
    values = np.arange(SIZE * SIZE, dtype=np.uint16).reshape(SIZE, SIZE) * 1000
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    expected = np.where(values == 5000, 255, (values.astype(int) + 128) // 257)
    file = png(SIZE, SIZE, 16, 0, rows, extra=struct.pack(">H", 5000))
    assert (decode(file, "x", Decoding(SIZE, 1))[0] == expected).all()
    colour = np.stack([values, values[::-1], values.T], -1)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colour)
    difference = decode(png(SIZE, SIZE, 16, 2, rows), "x", Decoding(SIZE, 3)) - (colour.transpose(2, 0, 1) / 257)
    assert np.abs(difference).max() <= 1


def test_float_is_zero_to_one():
    values = np.linspace(0, 1, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    assert (decoded(Image.fromarray(values), "TIFF", channels=1)[0] == np.rint(values * 255)).all()
    for wrong in (200.0, -0.1, np.nan):
        with raises_user_error("0 to 1.0"):
            decoded(Image.fromarray(np.full((SIZE, SIZE), wrong, np.float32)), "TIFF")


def test_white_may_be_another_value_in_images_of_more_than_8_bits():
    values = np.linspace(0, 4095, SIZE * SIZE).round().astype(np.uint16).reshape(SIZE, SIZE)
    expected = np.rint(values * (255 / 4095))
    for stored in (values, values.astype(np.int32), values.astype(np.float32)):
        assert (decoded(Image.fromarray(stored), "TIFF", channels=1, reading=Reading(4095))[0] == expected).all()
    with raises_user_error("0 to 4095", "`white`"):
        decoded(Image.fromarray(values), "PNG", reading=Reading(4000))
    pixels = noise(SIZE, SIZE)
    assert (decoded(Image.fromarray(pixels), channels=1, reading=Reading(4095))[0] == pixels).all()


def test_transparency_may_be_dropped_as_torch_fidelity_drops_it():
    pixels = noise(SIZE, SIZE, 4)
    palette = Image.fromarray(pixels[..., 0] % 4)
    palette.putpalette(noise(4, 3, seed=1).tobytes())
    images = [Image.fromarray(pixels), Image.fromarray(pixels).convert("LA")]
    images += [palette, Image.fromarray(pixels[..., :3]), Image.fromarray(pixels[..., 0])]
    options = [{}, {}, {"transparency": 2}, {"transparency": (1, 2, 3)}, {"transparency": 3}]
    for image, option in zip(images, options, strict=True):
        stored = saved(image, "PNG", **option)
        expected = np.asarray(Image.open(stored).convert("RGB")).transpose(2, 0, 1)
        assert (decode(stored, "x", Decoding(SIZE, 3, reading=Reading(on_white=False))) == expected).all()


def test_lab_becomes_grey_by_way_of_rgb():
    lab = Image.fromarray(noise(SIZE, SIZE, 3), "LAB")
    expected = np.asarray(lab.convert("RGB").convert("L"))
    assert (decoded(lab, "TIFF", channels=1)[0] == expected).all()


def test_first_frame_of_an_animation():
    frames = [Image.new("L", (SIZE, SIZE), value) for value in (10, 200)]
    for kind in ("GIF", "PNG", "TIFF"):
        assert (decoded(frames[0], kind, channels=1, save_all=True, append_images=frames[1:]) == 10).all()


def test_exif_orientation_is_ignored():
    image = Image.fromarray(noise(SIZE, SIZE, 3))
    turned = Image.Exif()
    turned[0x0112] = 6
    plain = decoded(image, "JPEG")
    assert (decoded(image, "JPEG", exif=turned) == plain).all()


def adm_crop(pil_image: Image.Image, image_size: int) -> np.ndarray:
    """Crop as guided-diffusion and DiT do, step by step, without a shortcut for images that fit."""
    while min(*pil_image.size) >= 2 * image_size:
        pil_image = pil_image.resize(tuple(x // 2 for x in pil_image.size), resample=Image.BOX)
    scale = image_size / min(*pil_image.size)
    pil_image = pil_image.resize(tuple(round(x * scale) for x in pil_image.size), resample=Image.BICUBIC)
    arr = np.array(pil_image)
    crop_y, crop_x = (arr.shape[0] - image_size) // 2, (arr.shape[1] - image_size) // 2
    return arr[crop_y : crop_y + image_size, crop_x : crop_x + image_size]


# one side just fits, is one more or less, or just halves; up to three halvings, of odd sizes too; and enlargements
SIDES = [1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 47, 63, 65, 71]


@pytest.mark.parametrize("size", [1, 7, 8, 32])
def test_crop_is_that_of_adm(size):
    for width in SIDES:
        for height in SIDES:
            image = Image.fromarray(noise(height, width, 3, seed=width))
            ours = decode(saved(image, "BMP"), "x", Decoding(size, 3))
            assert (ours.transpose(1, 2, 0) == adm_crop(image, size)).all(), (width, height)


def test_negative_values_are_told_to_be_shifted_and_no_value_of_white():
    """As signed TIFFs of CT have them."""
    values = np.arange(-100, -36, dtype=np.int16).reshape(8, 8)
    file = io.BytesIO()
    Image.frombytes("I;16", (8, 8), values.tobytes()).save(file, "TIFF", tiffinfo={339: 2})
    with raises_user_error("x", "-100 to -37", "shift and scale") as caught:
        decode(io.BytesIO(file.getvalue()), "x", Decoding(8, 1))
    assert "white" not in str(caught.value)


def test_formats_that_run_another_program_are_not_opened():
    """Ghostscript decodes an EPS, and an IPTC file may contain one."""
    assert {"EPS", "IPTC"}.isdisjoint(formats())
    file = io.BytesIO()
    Image.fromarray(noise(SIZE, SIZE)).save(file, "EPS")
    with raises_user_error("a.png"):
        decode(io.BytesIO(file.getvalue()), "a.png", Decoding(SIZE, 3))


@pytest.mark.parametrize(("width", "height"), [(1, 65000), (65000, 1)])
def test_an_image_that_would_grow_without_bound_is_refused(width, height):
    rows = (b"\0" + bytes(width)) * height
    words = ("x", f"{width}x{height}", 256)
    with raises_user_error(words):
        decode(png(width, height, 8, 0, rows), "x", Decoding(256, 3))
    assert decode(png(width, height, 8, 0, rows), "x", Decoding(8, 1)).shape == (1, 8, 8)


def test_more_pixels_than_fit_are_refused_before_they_are_decoded(recwarn):
    with raises_user_error("x", "pixels"):
        decode(png(9460, 9460, 8, 0, b"\0"), "x", Decoding(SIZE, 3))


def test_pixels_of_a_png_that_differ_from_their_checksum_are_refused_and_what_follows_them_is_not_read():
    good = png(SIZE, SIZE, 8, 0, (b"\0" + bytes(SIZE)) * SIZE).getvalue()
    place = good.index(b"IEND") - 5  # the last byte of the checksum of IDAT, which PIL does not compare
    flipped = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    with raises_user_error("x", "damaged"):
        decode(io.BytesIO(flipped), "x", Decoding(SIZE, 1))
    for rest in (good[:-1], good[:-8], good[:-12], good + b"more"):
        assert decode(io.BytesIO(rest), "x", Decoding(SIZE, 1)).max() == 0
