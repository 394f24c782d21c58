import io
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from uvit_decay.data.pictures import Listing, decode, list_pictures, read
from uvit_decay.errors import UserError

SIZE = 8


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def saved(image: Image.Image, kind: str, **options: object) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def decoded(image: Image.Image, kind: str = "PNG", channels: int = 3, **options: object) -> np.ndarray:
    return decode(saved(image, kind, **options), "x", SIZE, channels)


def tree(root: Path, names: list[str], size: int = SIZE) -> Path:
    """A folder with one distinct picture for each name."""
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(size, size, 3, seed=seed)).save(root / name)
    return root


def zipped(folder: Path, file: Path, prefix: str = "") -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*"), reverse=True):  # the order in the zip must not matter
            if path.is_file():
                archive.writestr(prefix + path.relative_to(folder).as_posix(), path.read_bytes())
    return file


def png(width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b"") -> io.BytesIO:
    """A PNG written byte by byte, for what PIL cannot write. `rows` includes the filter bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"tRNS", extra) if extra else b""
    return io.BytesIO(b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def fails(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        list_pictures(path)
    assert all(word in str(caught.value) for word in (str(path), *words)), caught.value
    assert "\n" not in str(caught.value)


# --- modes -----------------------------------------------------------------------------------------------------------


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


def test_cmyk_and_ycbcr():
    cmyk = Image.new("CMYK", (SIZE, SIZE), (255, 0, 0, 0))
    assert np.abs(decoded(cmyk, "TIFF")[:, 0, 0].astype(int) - (0, 255, 255)).max() == 0
    assert np.abs(decoded(cmyk, "JPEG", quality=95)[:, 0, 0].astype(int) - (0, 255, 255)).max() <= 2
    black = Image.new("CMYK", (SIZE, SIZE), (0, 0, 0, 255))
    assert (decoded(black, "TIFF", channels=1) == 0).all()
    red = Image.new("YCbCr", (SIZE, SIZE), (76, 85, 255))  # JFIF: Y 76, Cb 85, Cr 255 is (254, 0, 0)
    assert np.abs(decoded(red, "TIFF")[:, 0, 0].astype(int) - (254, 0, 0)).max() <= 1


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
    with pytest.raises(UserError, match="^x: values 0 to 65536 in mode I, expected 0 to 65535$"):
        decoded(Image.fromarray(np.array([[0, 65536]], dtype=np.int32)), "TIFF")


def test_sixteen_bit_png_with_transparency_and_colour():
    values = np.arange(SIZE * SIZE, dtype=np.uint16).reshape(SIZE, SIZE) * 1000
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    expected = np.where(values == 5000, 255, (values.astype(int) + 128) // 257)
    file = png(SIZE, SIZE, 16, 0, rows, extra=struct.pack(">H", 5000))
    assert (decode(file, "x", SIZE, 1)[0] == expected).all()
    colour = np.stack([values, values[::-1], values.T], -1)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colour)
    difference = decode(png(SIZE, SIZE, 16, 2, rows), "x", SIZE, 3) - (colour.transpose(2, 0, 1) / 257)
    assert np.abs(difference).max() <= 1


def test_float_is_zero_to_one():
    values = np.linspace(0, 1, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    assert (decoded(Image.fromarray(values), "TIFF", channels=1)[0] == np.rint(values * 255)).all()
    for wrong in (200.0, -0.1, np.nan):
        with pytest.raises(UserError, match="expected 0 to 1"):
            decoded(Image.fromarray(np.full((SIZE, SIZE), wrong, np.float32)), "TIFF")


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


@pytest.mark.parametrize(("size", "channels"), [(SIZE, 2), (SIZE, 4), (0, 3), (-1, 1)])
def test_impossible_shapes(size, channels):
    with pytest.raises(UserError):
        decode(saved(Image.new("L", (SIZE, SIZE)), "PNG"), "x", size, channels)
    with pytest.raises(UserError, match="not"):
        read(Listing(Path(), (), (), ()), size, channels)


# --- crop ------------------------------------------------------------------------------------------------------------


def halved(band: np.ndarray, axes: tuple[int, int]) -> np.ndarray:
    for axis in axes:  # PIL rounds after each direction
        pairs = band.astype(int).swapaxes(0, axis)
        band = ((pairs[0::2] + pairs[1::2] + 1) // 2).swapaxes(0, axis)
    return band


def adm_crop(pixels: np.ndarray, size: int, axes: tuple[int, int]) -> np.ndarray:
    """Written again from guided-diffusion: halvings as means in numpy, one bicubic resize, the centre."""
    while min(pixels.shape[:2]) >= 2 * size:
        assert pixels.shape[0] % 2 == pixels.shape[1] % 2 == 0, "choose test sizes that halve evenly"
        pixels = np.stack([halved(pixels[..., band], axes) for band in range(3)], -1).astype(np.uint8)
    height, width = pixels.shape[:2]
    scale = size / min(height, width)
    scaled = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), resample=Image.BICUBIC)
    pixels = np.array(scaled)
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (64, 64), (15, 15), (17, 8), (3, 5), (1, 7), (8, 9), (80, 32)])
def test_crop_is_that_of_adm(shape):
    smooth = np.asarray(Image.fromarray(noise(3, 4, 3)).resize(shape[::-1], Image.Resampling.BILINEAR))
    pixels = np.clip(smooth.astype(int) + noise(*shape, 3, seed=1) // 16, 0, 255).astype(np.uint8)
    ours = decoded(Image.fromarray(pixels)).transpose(1, 2, 0)
    assert ours.shape == (SIZE, SIZE, 3)
    # PIL 13 halves columns first, but rows first in pictures more than about twice as high as wide
    assert any((ours == adm_crop(pixels, SIZE, axes)).all() for axes in ((1, 0), (0, 1)))


def test_crop_keeps_the_middle():
    pixels = np.zeros((SIZE, 3 * SIZE, 3), np.uint8)
    pixels[:, SIZE : 2 * SIZE] = noise(SIZE, SIZE, 3)
    assert (decoded(Image.fromarray(pixels)) == pixels[:, SIZE : 2 * SIZE].transpose(2, 0, 1)).all()


# --- listing ---------------------------------------------------------------------------------------------------------

CLASSES = ["dog/b.png", "cat/a.PNG", "cat/c.Bmp", "dog/a.webp", "ant/x.tiff"]


def test_folder_and_zip_are_the_same(tmp_path):
    folder = tree(tmp_path / "data", CLASSES)
    (folder / "cat" / "notes.txt").write_text("not a picture")
    (folder / "labels.h5").write_bytes(b"PIL knows the extension but cannot decode it")
    for junk in (".hidden.png", "cat/._a.PNG", "__MACOSX/cat/a.png", ".git/x.png", "cat/Thumbs.db"):
        (folder / junk).parent.mkdir(parents=True, exist_ok=True)
        (folder / junk).write_bytes(b"junk")
    listing = list_pictures(folder)
    assert listing.members == ("ant/x.tiff", "cat/a.PNG", "cat/c.Bmp", "dog/a.webp", "dog/b.png")
    assert listing.class_names == ("ant", "cat", "dog")
    assert listing.labels == (0, 1, 1, 2, 2)
    pixels = read(listing, SIZE, 3)
    assert (pixels[1].numpy() == noise(SIZE, SIZE, 3, seed=1).transpose(2, 0, 1)).all()
    for prefix in ("", "wrapper/", "./", "outer/inner/"):
        other = list_pictures(zipped(folder, tmp_path / f"{len(prefix)}.zip", prefix))
        assert other.members == tuple(prefix + member for member in listing.members)
        assert (other.labels, other.class_names) == (listing.labels, listing.class_names)
        assert torch.equal(read(other, SIZE, 3), pixels)


def test_flat_pictures_have_no_classes(tmp_path):
    folder = tree(tmp_path / "flat", ["b.png", "a.png"])
    expected = (("a.png", "b.png"), (0, 0), ())
    for path in (folder, str(folder), zipped(folder, tmp_path / "flat.zip")):
        listing = list_pictures(path)
        assert (listing.members, listing.labels, listing.class_names) == expected


def test_nested_folders_and_links(tmp_path):
    folder = tree(tmp_path / "nested", ["animals/cat/a.png", "things/car/b.png"])
    tree(tmp_path / "elsewhere", ["c.png"])
    (folder / "bee").symlink_to(tmp_path / "elsewhere")
    listing = list_pictures(folder)
    assert listing.class_names == ("bee", "car", "cat")
    assert listing.members == ("animals/cat/a.png", "bee/c.png", "things/car/b.png")
    assert listing.labels == (2, 0, 1)


@pytest.mark.parametrize("names", [["a.png", "cat/b.png"], ["w/a.png", "w/cat/b.png"], ["cat/a.png", "cat/x/y/b.png"]])
def test_flat_and_foldered_do_not_mix(tmp_path, names):
    fails(tree(tmp_path / "mixed", names), "classes are unclear", str(Path(names[1]).parent))


def test_two_folders_for_one_class(tmp_path):
    folder = tree(tmp_path / "split", ["test/cat/a.png", "train/cat/a.png", "train/dog/a.png"])
    fails(folder, "test/cat", "train/cat", "point at one of them")
    fails(zipped(folder, tmp_path / "split.zip"), "test/cat", "train/cat")


def test_paths_that_are_no_sets_of_pictures(tmp_path):
    fails(tmp_path / "missing", "no such")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "no pictures", ".png")
    fails(zipped(tmp_path / "empty", tmp_path / "empty.zip"), "no pictures", ".png")
    (tmp_path / "text.zip").write_text("not a zip")
    fails(tmp_path / "text.zip", "not a zip")
    (tmp_path / "text.txt").write_text("not a zip")
    fails(tmp_path / "text.txt", "neither a folder nor a zip")
    whole = zipped(tree(tmp_path / "data", CLASSES), tmp_path / "whole.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    fails(tmp_path / "cut.zip", "cut short")


# --- reading ---------------------------------------------------------------------------------------------------------


def test_indices(tmp_path):
    folder = tree(tmp_path / "data", [f"{i:03}.png" for i in range(150)])
    for path in (folder, zipped(folder, tmp_path / "data.zip")):
        listing = list_pictures(path)
        whole = read(listing, SIZE, 3)
        assert whole.shape == (150, 3, SIZE, SIZE)
        assert whole.dtype == torch.uint8
        assert all((whole[i].numpy().transpose(1, 2, 0) == noise(SIZE, SIZE, 3, seed=i)).all() for i in range(150))
        assert torch.equal(read(listing, SIZE, 3, indices=[7, 2, 7]), whole[[7, 2, 7]])
        assert read(listing, SIZE, 1, indices=[]).shape == (0, 1, SIZE, SIZE)


def test_progress_only_when_asked_or_long(tmp_path, capfd):
    listing = list_pictures(tree(tmp_path / "data", ["a.png"]))
    read(listing, SIZE, 3)
    assert capfd.readouterr().err == ""
    read(listing, SIZE, 3, progress=True)
    assert "reading pictures" in capfd.readouterr().err
    read(listing, SIZE, 3, indices=[0] * 2001)
    assert "reading pictures" in capfd.readouterr().err


def test_broken_pictures_are_counted_and_the_first_named(tmp_path):
    folder = tree(tmp_path / "data", [f"cat/{i:02}.jpg" for i in range(40)], size=64)
    whole = (folder / "cat/07.jpg").read_bytes()
    (folder / "cat/07.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "cat/31.jpg").write_text("text")
    (folder / "cat/32.jpg").write_bytes(b"")
    for path in (folder, zipped(folder, tmp_path / "data.zip")):
        with pytest.raises(UserError) as caught:
            read(list_pictures(path), SIZE, 3)
        message = str(caught.value)
        assert message.startswith(f"{path}: 3 of 40 pictures cannot be read; the first is cat/07.jpg: ")
        assert "truncated" in message
        assert "\n" not in message
        with pytest.raises(UserError, match="2 of 2 .* cat/31.jpg: not a picture that PIL knows .*kind of file"):
            read(list_pictures(path), SIZE, 3, indices=[31, 32])


def test_damage_inside_a_zip_and_missing_files(tmp_path):
    folder = tree(tmp_path / "data", ["a.png", "b.png"], size=64)
    path = zipped(folder, tmp_path / "data.zip")
    data = bytearray(path.read_bytes())
    data[2000:2010] = bytes(10)  # in the middle of b.png, which was written first
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"1 of 2 pictures cannot be read; the first is b.png: "):
        read(list_pictures(path), SIZE, 3)
    listing = list_pictures(folder)
    (folder / "a.png").unlink()
    with pytest.raises(UserError, match=r"1 of 2 .*a.png: .*No such file"):
        read(listing, SIZE, 3)


def test_bomb(tmp_path):
    rows = b"\0"  # 30000 x 30000 in the header is enough: PIL refuses before it decodes
    with pytest.raises(UserError, match=r"^bomb.png: .*decompression bomb"):
        decode(png(30000, 30000, 8, 0, rows), "bomb.png", SIZE, 3)


def test_a_replaced_zip_is_read_anew(tmp_path):
    path = zipped(tree(tmp_path / "one", ["a.png"]), tmp_path / "data.zip")
    assert list_pictures(path).members == ("a.png",)
    zipped(tree(tmp_path / "two", ["b.png", "c.png"]), path)
    assert list_pictures(path).members == ("b.png", "c.png")


class OneByOne(Dataset):
    """What a dataset too large for memory does: reads in the worker."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing

    def __len__(self) -> int:
        return len(self.listing.members)

    def __getitem__(self, index: int) -> torch.Tensor:
        return read(self.listing, SIZE, 3, indices=[index])[0]


def test_worker_processes(tmp_path):
    folder = tree(tmp_path / "data", [f"{i:03}.png" for i in range(120)])
    listing = list_pictures(zipped(folder, tmp_path / "data.zip"))
    assert pickle.loads(pickle.dumps(listing)) == listing
    whole = read(listing, SIZE, 3)  # the parent's zip is open when the workers start
    loader = DataLoader(OneByOne(listing), batch_size=8, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(loader)), whole)
    assert torch.equal(read(listing, SIZE, 3), whole)
