"""Pictures from an image folder or a zip: list them with their classes, decode and crop them, read them into a tensor.

The class of a picture is the name of the folder that it lies in; pictures directly at the top have no class. Everything
here is uint8: the float range of the networks begins elsewhere. EXIF orientation and colour profiles are ignored, as in
the ADM pipeline whose crop this is and against whose reference statistics FIDs are compared.
"""

from __future__ import annotations

import lzma
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

from uvit_decay.errors import UserError, one_line

# PIL lists these formats but cannot decode them (labels.h5 is no picture), or, for EPS, would run another program.
_NOT_DECODABLE = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "PALM", "PDF", "WMF"}

# What PIL and zipfile raised on damaged bytes; a fuzz over 20 formats met no other.
_DAMAGED = (OSError, SyntaxError, ValueError, RuntimeError, TypeError, LookupError, EOFError, OverflowError)
_DAMAGED += (struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, Image.DecompressionBombError)


@dataclass(frozen=True)
class Listing:
    """Where pictures are and what they show. Holds no open file: it can be pickled and sent to worker processes.

    `members` are sorted names relative to `path`, '/' between folders; `labels[i]` indexes `class_names` (sorted).
    Without class folders `class_names` is empty and all labels are 0.
    """

    path: Path
    members: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]


def list_pictures(path: str | Path) -> Listing:
    """All pictures below a folder (links are followed) or inside a zip; nothing is decoded.

    Raises UserError: no such path, neither folder nor zip, damaged zip, no pictures, or folders that define no classes.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"{path}: no such folder or zip")
    _load_plugins()
    names = _folder_names(path) if path.is_dir() else _open_zip(path).archive.namelist()
    extensions = {end for end, kind in Image.registered_extensions().items() if kind not in _NOT_DECODABLE}
    members = sorted({name for name in names if _is_picture(name, extensions)})
    if not members:
        sought = "files ending in .png, .jpg, .jpeg, .webp or another extension that PIL reads, in any folder"
        raise UserError(f"{path}: no pictures in it; looked for {sought}, hidden files left out")
    folders = [name.rpartition("/")[0] for name in members]
    classes = {folder: PurePosixPath(folder).name for folder in sorted(set(folders))}
    if set(classes.values()) == {""}:
        return Listing(path, tuple(members), (0,) * len(members), ())
    _check_folders(path, {str(PurePosixPath(folder)) for folder in classes})
    class_names = sorted(set(classes.values()))
    index = {folder: class_names.index(name) for folder, name in classes.items()}
    return Listing(path, tuple(members), tuple(index[folder] for folder in folders), tuple(class_names))


def _folder_names(path: Path) -> Iterable[str]:
    def stop(error: OSError) -> None:  # os.walk would leave an unreadable folder out without a word
        raise UserError(f"{path}: {one_line(error)}")

    for folder, _, files in os.walk(path, onerror=stop, followlinks=True):
        inside = Path(folder).relative_to(path).as_posix()
        yield from files if inside == "." else (f"{inside}/{file}" for file in files)


def _is_picture(name: str, extensions: set[str]) -> bool:
    """False for hidden files and for what macOS and Windows add (__MACOSX, ._x.jpg; Thumbs.db has no picture's end)."""
    if os.path.splitext(name)[1].lower() not in extensions:
        return False
    return not any(part == "__MACOSX" or (part.startswith(".") and part != ".") for part in name.split("/"))


def _check_folders(path: Path, folders: set[str]) -> None:
    """UserError unless each folder with pictures is one class: none inside another one, no name twice."""
    seen: dict[str, str] = {}
    for folder in sorted(folders):
        outer = {str(parent) for parent in PurePosixPath(folder).parents}.intersection(folders)
        if outer:
            above = "at the top" if outer == {"."} else f"in {max(outer, key=len)}"
            mend = "put every picture into a class folder, or none"
            raise UserError(f"{path}: pictures both {above} and in {folder} below it, so classes are unclear; {mend}")
        name = PurePosixPath(folder).name
        if name in seen:
            mend = f"point at one of them, such as the tree that has {folder}"
            raise UserError(f"{path}: two folders for one class name, {seen[name]} and {folder}; {mend}")
        seen[name] = folder


def decode(file: BinaryIO, name: str, size: int, channels: int) -> np.ndarray:
    """One picture as uint8 (channels, size, size): grey for channels = 1, RGB for 3, cropped by `centre_crop`.

    Any format and mode of PIL, the first frame of animations, transparency on white. 16-bit grey and mode I are taken
    as 0..65535, float pictures as 0..1. (PIL itself cuts 16-bit colour to its high bytes while it reads.)
    Raises UserError that starts with `name` if the bytes cannot be decoded or if values are outside those ranges.
    """
    _check_shape(size, channels)
    try:
        with Image.open(file) as image:
            image.load()
            picture = _eight_bits(image, "L" if channels == 1 else "RGB")
    except UnidentifiedImageError:  # PIL's message would show the address of a BytesIO
        raise UserError(f"{name}: not a picture that PIL knows (empty, cut short or another kind of file)") from None
    except _DAMAGED as error:
        raise UserError(f"{name}: {one_line(error)}") from error
    pixels = np.asarray(centre_crop(picture, size))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _eight_bits(image: Image.Image, mode: str) -> Image.Image:
    """The picture in `mode` ("L" or "RGB"); ValueError if wide grey values are outside the ranges of `decode`."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        top = 1.0 if image.mode == "F" else 65535
        if not ((values >= 0) & (values <= top)).all():  # also NaN; clipping would make a float 0..255 picture white
            raise ValueError(f"values {values.min()} to {values.max()} in mode {image.mode}, expected 0 to {top}")
        grey = np.rint(values * (255 / top)).astype(np.uint8)
        if "transparency" in image.info:  # PNG: the one value that means transparent
            grey[values == image.info["transparency"]] = 255
        return Image.fromarray(grey).convert(mode)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """The size x size centre, scaled so that the shorter side just fits: ADM's `center_crop_arr` (guided-diffusion).

    Box-filtered halvings first, so that the bicubic filter never shrinks by 2 or more. A picture that is size x size
    already is returned as it is.
    """
    if image.size == (size, size):
        return image
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    x, y = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((x, y, x + size, y + size))


def read(
    listing: Listing, size: int, channels: int, indices: Sequence[int] | None = None, progress: bool | None = None
) -> Tensor:
    """The pictures (all, or those at `indices` in that order) as uint8 (n, channels, size, size), decoded by threads.

    Works in forked and spawned workers. `progress` None shows a bar for more than 2000 pictures.
    Raises UserError, after trying them all, that counts the pictures that cannot be read and explains the first.
    """
    _check_shape(size, channels)
    _load_plugins()  # before threads would race to do it
    members = listing.members if indices is None else [listing.members[i] for i in indices]
    out = torch.empty(len(members), channels, size, size, dtype=torch.uint8)
    pixels, fetch = out.numpy(), _fetcher(listing.path)

    def fill(rows: range) -> list[str]:
        """Decodes into the rows of `out`; returns what went wrong."""
        failures = []
        for row in rows:
            try:
                pixels[row] = decode(BytesIO(_fetch_one(fetch, members[row])), members[row], size, channels)
            except UserError as error:
                failures.append(str(error))
        return failures

    threads = min(16, os.cpu_count() or 1)
    step = min(64, 1 + len(members) // (4 * threads))  # a future for each picture would cost gigabytes on ImageNet
    chunks = [range(len(members))[start : start + step] for start in range(0, len(members), step)]
    failures: list[str] = []
    show = len(members) > 2000 if progress is None else progress
    pool = ThreadPoolExecutor(threads)
    with tqdm(total=len(members), desc="reading pictures", disable=not show) as bar:
        try:
            for chunk, failed in zip(chunks, pool.map(fill, chunks), strict=True):
                failures += failed
                bar.update(len(chunk))
        finally:
            pool.shutdown(cancel_futures=True)  # so that Ctrl-C does not wait for the rest of the set
    if failures:
        count = f"{len(failures)} of {len(members)} pictures cannot be read"
        raise UserError(f"{listing.path}: {count}; the first is {failures[0]}")
    return out


def _load_plugins() -> None:
    """All of PIL's formats, the common ones first: the order in which PIL tries them; a third faster on CIFAR-10."""
    Image.preinit()
    Image.init()


def _check_shape(size: int, channels: int) -> None:
    if channels not in (1, 3):
        raise UserError(f"pictures have 1 channel (grey) or 3 (RGB), not {channels}")
    if size < 1:
        raise UserError(f"the size of pictures must be 1 or more, not {size}")


def _fetch_one(fetch: Callable[[str], bytes], member: str) -> bytes:
    try:
        return fetch(member)
    except _DAMAGED as error:
        raise UserError(f"{member}: {one_line(error)}") from error


def _fetcher(path: Path) -> Callable[[str], bytes]:
    if path.is_dir():
        return lambda member: path.joinpath(member).read_bytes()
    return _open_zip(path).read


class _Zip:
    """An open zip for many threads: they share one file position and one count of references, hence the lock."""

    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path)
        self.lock = threading.Lock()

    def read(self, member: str) -> bytes:
        with self.lock:
            return self.archive.read(member)


def _open_zip(path: Path) -> _Zip:
    """The zip, kept open for the next call, since to open one of 50,000 pictures takes about a second."""
    try:
        state = path.stat()
        return _open_zip_once(path, os.getpid(), state.st_mtime_ns, state.st_size)
    except (zipfile.BadZipFile, OSError, struct.error, ValueError) as error:
        if path.suffix.lower() == ".zip":
            raise UserError(f"{path}: not a zip, or one that is cut short ({one_line(error)})") from error
        raise UserError(f"{path}: neither a folder nor a zip") from error


@lru_cache(maxsize=4)
def _open_zip_once(path: Path, process: int, modified: int, length: int) -> _Zip:
    """Keyed by the process too: a forked worker must not share its parent's file position or lock."""
    return _Zip(path)
