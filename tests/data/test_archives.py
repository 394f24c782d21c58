"""Tars of images: the layouts of ImageNet, what they may hold, and how they are refused."""

import gzip
import io
import lzma
import os
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from image_noise import SIZE, fails, noise, tar_of, tree, write_tar, write_zip
from PIL import Image
from refusals import find_line, raises_user_error

from uvit_decay.data import archives
from uvit_decay.data.decoding import Decoding
from uvit_decay.data.listing import list_images
from uvit_decay.data.reading import read

NAMES = ["n02/n02_1.JPEG", "n01/n01_10.JPEG", "n01/n01_2.JPEG", "n03/n03_1.JPEG"]


def png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(SIZE, SIZE, 3, seed=seed)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def whole(tmp_path) -> Path:
    """Return a tar of class folders."""
    return write_tar(tree(tmp_path / "data", NAMES), tmp_path / "train.tar")


def same(path: Path, folder: Path) -> None:
    """Check that `path` has the images, classes and bytes of the folder."""
    ours, theirs = list_images(path), list_images(folder)
    assert (ours.members, ours.labels, ours.class_names) == (theirs.members, theirs.labels, theirs.class_names)
    assert torch.equal(read(ours, Decoding(SIZE, 3)), read(theirs, Decoding(SIZE, 3)))
    for member, (offset, size) in zip(ours.members, ours.spans.tolist(), strict=True):
        data = path.read_bytes()[offset : offset + size]
        assert data == (folder / member).read_bytes()


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_class_folders(tmp_path, layout):
    folder = tree(tmp_path / "data", NAMES)
    same(write_tar(folder, tmp_path / "data.tar", layout=layout), folder)
    same(write_tar(folder, tmp_path / "named-otherwise", layout=layout), folder)


@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path, layout):
    folder = tree(tmp_path / "data", [f"{'deep/' * 30}katze-{'ü' * 60}/{'x' * 150}.png", "hünd/ß.png", "zebra/a.png"])
    same(write_tar(folder, tmp_path / "data.tar", layout=layout), folder)


def test_archives_inside_are_not_opened(tmp_path):
    folder = tree(tmp_path / "data", ["cat/a.png"])
    write_tar(folder, folder / "inner.tar")
    (folder / "backup.tar.gz").write_text("whatever")
    for path in (folder, write_tar(folder, tmp_path / "data.tar")):
        assert list_images(path).members == ("cat/a.png",)
    tars = tmp_path / "tars"
    tars.mkdir()
    write_tar(folder / "cat", tars / "cat.tar")
    for path in (tars, write_tar(tars, tmp_path / "train.tar")):  # as ImageNet's
        fails(path, "unpack")


def test_of_a_name_that_comes_twice_the_last_counts(tmp_path):
    path = write_tar(tree(tmp_path / "old", ["a.png"]), tmp_path / "data.tar")
    write_tar(tree(tmp_path / "new", ["b.png", "a.png"]), path, mode="a")  # as `tar --append` does
    listing = list_images(path)
    assert listing.members == ("a.png", "b.png")
    assert (read(listing, Decoding(SIZE, 3))[0].permute(1, 2, 0).numpy() == noise(SIZE, SIZE, 3, seed=1)).all()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_no_file_stays_open(whole):
    before = len(os.listdir("/proc/self/fd"))
    read(list_images(whole), Decoding(SIZE, 3))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tar_that_changes_after_it_was_listed(whole):
    listing = list_images(whole)
    os.truncate(whole, listing.spans[:, 0].max() + 1)
    with raises_user_error("train.tar", "1 of 4", "shorter"):
        read(listing, Decoding(SIZE, 3))
    whole.unlink()
    with raises_user_error("train.tar", "No such file"):
        read(listing, Decoding(SIZE, 3))


def test_compressed_tars(tmp_path):
    data = write_tar(tree(tmp_path / "data", NAMES), tmp_path / "plain.tar").read_bytes()
    gz, xz = tmp_path / "data.tar.gz", tmp_path / "data.tar.xz"
    gz.write_bytes(gzip.compress(data))
    fails(gz, "compression")
    fails(gz.rename(tmp_path / "data.tar"), "compressed")
    xz.write_bytes(lzma.compress(data))
    fails(xz, "compression")


def test_a_cut_tar_is_noticed_wherever_it_is_cut(tmp_path):
    data = write_tar(tree(tmp_path / "data", NAMES), tmp_path / "data.tar").read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512  # here the end mark begins
    path = tmp_path / "cut.tar"
    for length in [*range(512, end, 256), end - 1, end, end + 511]:
        path.write_bytes(data[:length])
        fails(path, "cut short")
    path.write_bytes(data[: end + 512])
    assert len(list_images(path).members) == 4


def header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def test_sizes_that_lie(tmp_path):
    path = tmp_path / "lies.tar"
    for size in (-512, -1024, -(2**40), 2**30):  # -512: the next header would be this one, for ever
        path.write_bytes(header("first.png", 512) + bytes(512) + header("cat/a.png", size) + bytes(10240))
        fails(path, "damaged", f"size of {size}" if size < 0 else "end of data")


def test_links_and_names_that_lead_out_are_not_followed(tmp_path, capfd):
    secret = tree(tmp_path / "secret", ["a.png"]) / "a.png"
    path = tar_of(
        tmp_path / "hostile.tar",
        {str(secret): png(1), "cat/good.png": png(2), "../../cat/up.png": png(), "cat/x/../../../../up.png": png()},
    )
    with tarfile.open(path, "a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            entry = tarfile.TarInfo(f"cat/{kind.decode()}.png")
            entry.type, entry.linkname = kind, str(secret)
            archive.addfile(entry)
    before = sorted(tmp_path.rglob("*"))
    listing = list_images(path)
    assert listing.members == (str(secret), "cat/good.png")
    assert listing.class_names == ("cat", secret.parts[1])
    images = read(listing, Decoding(SIZE, 3))
    for seed, image in enumerate(images, 1):  # what is in the tar, not what has that name on disk
        assert (image.permute(1, 2, 0).numpy() == noise(SIZE, SIZE, 3, seed=seed)).all()
    find_line(capfd.readouterr().err, "hostile.tar", "2 links")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_zip_of_powershell_has_its_classes(tmp_path):
    folder = tree(tmp_path / "data", NAMES)
    path = write_zip(folder, tmp_path / "data.zip")
    content = path.read_bytes()
    for name in NAMES:  # in the local headers and in the directory
        assert content.count(name.encode()) == 2
        content = content.replace(name.encode(), name.replace("/", "\\").encode())
    (tmp_path / "windows.zip").write_bytes(content)
    ours, theirs = list_images(tmp_path / "windows.zip"), list_images(path)
    assert (ours.members, ours.labels, ours.class_names) == (theirs.members, theirs.labels, ("n01", "n02", "n03"))
    assert ours.states(range(4)) == theirs.states(range(4))
    assert torch.equal(read(ours, Decoding(SIZE, 3)), read(theirs, Decoding(SIZE, 3)))


def test_names_in_utf_8_are_read_without_the_flag_that_says_so(tmp_path):
    """As `zip` and macOS write them; a name that is not UTF-8 stays in code page 437."""
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("K\u00e4fer/a.png", "\u65e5\u672c/b.png"):
            file.writestr(name, b"content")
    content = bytearray(path.read_bytes())
    for signature, place in ((b"PK\x03\x04", 7), (b"PK\x01\x02", 9)):
        start = content.find(signature)
        while start >= 0:
            content[start + place] &= ~8
            start = content.find(signature, start + 1)
    path.write_bytes(content.replace("\u65e5\u672c".encode(), b"\xff" * 6))
    names = archives.find(path, {".png"}).names
    assert set(names) == {"K\u00e4fer/a.png", "\u00a0" * 6 + "/b.png"}
    with archives.open_members(path, archives.ArchiveIndex(names)) as fetch:
        assert {fetch(i).getvalue() for i in range(2)} == {b"content"}


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


@pytest.mark.parametrize("links", [{"cat/up": "..", "cat/again": ".."}, {"one": "cat", "two": "cat"}])
def test_links_that_lead_to_a_folder_twice_are_named(tmp_path, links):
    folder = tree(tmp_path / "data", ["cat/a.png", "dog/b.png"])
    for name, target in links.items():
        (folder / name).symlink_to(target)
    with raises_user_error(folder, "link"):
        list_images(folder)
