"""Images that would run programs, take all memory, or never end: refused before they can."""

import io
import os
import signal
import struct
import tarfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from image_noise import SIZE, noise, tree, write_tar, write_zip
from PIL import EpsImagePlugin, Image
from refusals import raises_user_error
from test_image_decoding import png

from uvit_decay.data import archives
from uvit_decay.data.classes import class_list
from uvit_decay.data.decoding import Decoding, decode
from uvit_decay.data.listing import list_images
from uvit_decay.data.reading import read, size_of


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


def eps() -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(SIZE, SIZE)).save(file, "EPS")
    return file.getvalue()


def iptc() -> bytes:
    """Return an IPTC file whose image is an EPS."""
    fields = {(3, 60): b"\1\0", (3, 20): bytes([SIZE]), (3, 30): bytes([SIZE]), (3, 120): b"\5", (8, 10): eps()}
    packed = (struct.pack(">BBBH", 0x1C, *tag, len(data)) + data for tag, data in fields.items())
    return b"".join(packed) + bytes(5)


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """Return a `gs` on the path that leaves a trace when it is started."""
    gs, trace = tmp_path / "bin" / "gs", tmp_path / "trace"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {trace}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gs.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return trace


@pytest.mark.parametrize("content", [eps, iptc])
@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_no_other_program_is_started_whatever_a_file_is_called(tmp_path, ghostscript, content, name):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(content())
    (folder / "x.eps").write_bytes(eps())
    listing = list_images(folder)
    assert listing.members == (name,)
    for look in (size_of, lambda listing: read(listing, Decoding(SIZE, 3))):
        with raises_user_error(name):
            look(listing)
    assert not ghostscript.exists()


@pytest.mark.parametrize(("width", "height"), [(1, 65000), (65000, 1), (2, 10000)])
def test_an_image_that_would_grow_without_bound_is_refused(width, height):
    rows = (b"\0" + bytes(width)) * height
    words = ("x", f"{width}x{height}", 256)
    with raises_user_error(words):
        decode(png(width, height, 8, 0, rows), "x", Decoding(256, 3))
    assert decode(png(width, height, 8, 0, rows), "x", Decoding(8, 1)).shape == (1, 8, 8)


@pytest.mark.parametrize("side", [9460, 13000, 30000])  # PIL warns of the first two
def test_more_pixels_than_fit_are_refused_before_they_are_decoded(side, recwarn):
    with raises_user_error("x", "pixels"):
        decode(png(side, side, 8, 0, b"\0"), "x", Decoding(SIZE, 3))


def test_a_file_that_is_larger_than_any_image_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 5000)
    folder = tree(tmp_path / "data", ["c/a.png", "c/b.png"])
    (folder / "c/b.png").write_bytes((folder / "c/b.png").read_bytes() + bytes(5000))
    for path in (folder, write_zip(folder, tmp_path / "z.zip"), write_tar(folder, tmp_path / "t.tar")):
        with raises_user_error("1 of 2", "c/b.png", "5,000"):
            read(list_images(path), Decoding(SIZE, 3))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_member_that_unpacks_to_more_than_it_says_is_cut_there(tmp_path, method):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.png", bytes(2**24))
    content = path.read_bytes()
    path.write_bytes(content.replace(struct.pack("<I", 2**24), struct.pack("<I", 1000)))
    with raises_user_error("a.png"):
        read(list_images(path), Decoding(SIZE, 3))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_tar_whose_names_are_said_to_be_terabytes_is_refused(tmp_path, kind):
    entry = tarfile.TarInfo("a.png")
    entry.type, entry.size = kind, 2**40
    (tmp_path / "t.tar").write_bytes(entry.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with raises_user_error("t.tar"):
        list_images(tmp_path / "t.tar")


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    folder = tree(tmp_path / "data", ["a.png"])
    os.mkfifo(folder / "x.png")
    with at_most(20), raises_user_error("1 of 2", "x.png", "regular file"):
        read(list_images(folder), Decoding(SIZE, 3))
    os.mkfifo(tmp_path / "x.tar")
    for path in (folder / "x.png", tmp_path / "x.tar", Path("/dev/zero")):
        with at_most(20), raises_user_error(path, "regular file"):
            list_images(path)
    for path in (folder / "x.png", Path("/dev/zero")):
        with at_most(20), raises_user_error(path, "file"):
            class_list(path)


@pytest.mark.parametrize("links", [{"cat/up": ".."}, {"cat/up": "..", "cat/again": ".."}, {"one": "cat", "two": "cat"}])
def test_links_that_lead_to_a_folder_twice_are_named(tmp_path, links):
    folder = tree(tmp_path / "data", ["cat/a.png", "dog/b.png"])
    for name, target in links.items():
        (folder / name).symlink_to(target)
    with at_most(20), raises_user_error(folder, "link"):
        list_images(folder)


def test_the_home_of_nobody_is_no_path():
    for look, words in ((list_images, "folder"), (class_list, "text")):
        with raises_user_error("~nobody_here/x", words):
            look("~nobody_here/x")


def test_pixels_of_a_png_that_differ_from_their_checksum_are_refused_and_what_follows_them_is_not_read():
    good = png(SIZE, SIZE, 8, 0, (b"\0" + bytes(SIZE)) * SIZE).getvalue()
    place = good.index(b"IEND") - 5  # the last byte of the checksum of IDAT, which PIL does not compare
    flipped = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    with raises_user_error("x", "damaged"):
        decode(io.BytesIO(flipped), "x", Decoding(SIZE, 1))
    for rest in (good[:-1], good[:-8], good[:-12], good + b"more"):
        assert decode(io.BytesIO(rest), "x", Decoding(SIZE, 1)).max() == 0
