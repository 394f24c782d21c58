"""Images that would run programs, take all memory, or never end: refused before they can."""

import io
import os
import signal
import struct
import tarfile
import zipfile
from contextlib import contextmanager

import pytest
from image_noise import SIZE, noise, tree, write_tar, write_zip
from PIL import Image
from refusals import raises_user_error
from test_image_decoding import png

from uvit_decay.data import archives
from uvit_decay.data.classes import class_list
from uvit_decay.data.decoding import Decoding, decode, formats
from uvit_decay.data.listing import list_images
from uvit_decay.data.reading import read


@contextmanager
def at_most(seconds):
    """Fail instead of waiting forever."""
    previous = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it has no end"))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


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


def test_more_pixels_than_fit_are_refused_before_they_are_decoded():
    with raises_user_error("x", "pixels"):
        decode(png(9460, 9460, 8, 0, b"\0"), "x", Decoding(SIZE, 3))


def test_a_file_that_is_larger_than_any_image_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 5000)
    folder = tree(tmp_path / "data", ["c/a.png", "c/b.png"])
    (folder / "c/b.png").write_bytes((folder / "c/b.png").read_bytes() + bytes(5000))
    for path in (folder, write_zip(folder, tmp_path / "z.zip"), write_tar(folder, tmp_path / "t.tar")):
        with raises_user_error("1 of 2", "c/b.png", "5,000"):
            read(list_images(path), Decoding(SIZE, 3))


def test_a_zip_member_that_unpacks_to_more_than_it_says_is_cut_there(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(2**24))
    content = path.read_bytes()
    path.write_bytes(content.replace(struct.pack("<I", 2**24), struct.pack("<I", 1000)))
    with raises_user_error("a.png"):
        read(list_images(path), Decoding(SIZE, 3))


def test_a_tar_whose_names_are_said_to_be_terabytes_is_refused(tmp_path):
    entry = tarfile.TarInfo("a.png")
    entry.type, entry.size = tarfile.GNUTYPE_LONGNAME, 2**40
    (tmp_path / "t.tar").write_bytes(entry.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with raises_user_error("t.tar"):
        list_images(tmp_path / "t.tar")


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    folder = tree(tmp_path / "data", ["a.png"])
    os.mkfifo(folder / "x.png")
    with at_most(20), raises_user_error("1 of 2", "x.png", "regular file"):
        read(list_images(folder), Decoding(SIZE, 3))
    for look in (list_images, class_list):
        with at_most(20), raises_user_error(folder / "x.png", "file"):
            look(folder / "x.png")


@pytest.mark.parametrize("links", [{"cat/up": "..", "cat/again": ".."}, {"one": "cat", "two": "cat"}])
def test_links_that_lead_to_a_folder_twice_are_named(tmp_path, links):
    folder = tree(tmp_path / "data", ["cat/a.png", "dog/b.png"])
    for name, target in links.items():
        (folder / name).symlink_to(target)
    with at_most(20), raises_user_error(folder, "link"):
        list_images(folder)


def test_pixels_of_a_png_that_differ_from_their_checksum_are_refused_and_what_follows_them_is_not_read():
    good = png(SIZE, SIZE, 8, 0, (b"\0" + bytes(SIZE)) * SIZE).getvalue()
    place = good.index(b"IEND") - 5  # the last byte of the checksum of IDAT, which PIL does not compare
    flipped = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    with raises_user_error("x", "damaged"):
        decode(io.BytesIO(flipped), "x", Decoding(SIZE, 1))
    for rest in (good[:-1], good[:-8], good[:-12], good + b"more"):
        assert decode(io.BytesIO(rest), "x", Decoding(SIZE, 1)).max() == 0
