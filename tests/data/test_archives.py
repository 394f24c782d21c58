"""Tars of images: the layouts of ImageNet, what they may hold, and how they are refused."""

import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path

import pytest
import torch
from image_noise import SIZE, class_tars, fails, noise, tar_of, tarred, tree
from PIL import Image
from refusals import find_line, raises_user_error

from uvit_decay.data import archives
from uvit_decay.data.image_files import list_images, read

NAMES = ["n02/n02_1.JPEG", "n01/n01_10.JPEG", "n01/n01_2.JPEG", "n03/n03_1.JPEG"]


def png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(SIZE, SIZE, 3, seed=seed)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def tars(tmp_path) -> Path:
    """A folder with a tar of each class."""
    return class_tars(tree(tmp_path / "data", NAMES), tmp_path / "tars")


@pytest.fixture
def whole(tars, tmp_path) -> Path:
    """A tar of these tars, as ImageNet's."""
    return tarred(tars, tmp_path / "train.tar")


def same(path: Path, folder: Path) -> None:
    """The images, classes and bytes of `path` are those of the folder."""
    ours, theirs = list_images(path), list_images(folder)
    assert (ours.members, ours.labels, ours.class_names) == (theirs.members, theirs.labels, theirs.class_names)
    assert torch.equal(read(ours, SIZE, 3), read(theirs, SIZE, 3))
    for member, (number, offset, size) in zip(ours.members, ours.spans.tolist(), strict=True):
        data = (path / ours.tars[number]).read_bytes()[offset : offset + size]
        assert data == (folder / member).read_bytes()


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_class_folders(tmp_path, layout):
    folder = tree(tmp_path / "data", NAMES)
    same(tarred(folder, tmp_path / "data.tar", layout=layout), folder)
    same(tarred(folder, tmp_path / "named-otherwise", layout=layout), folder)


@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path, layout):
    folder = tree(tmp_path / "data", [f"{'deep/' * 30}katze-{'ü' * 60}/{'x' * 150}.png", "hünd/ß.png", "zebra/a.png"])
    same(tarred(folder, tmp_path / "data.tar", layout=layout), folder)


def test_official_imagenet_and_a_folder_of_its_tars(tars, tmp_path):
    folder = tmp_path / "data"
    same(tars, folder)
    same(tarred(tars, tmp_path / "ILSVRC2012_img_train.tar", layout=tarfile.GNU_FORMAT), folder)
    (tars / "._n01.tar").write_bytes(b"what macOS adds")
    (tars / "readme.txt").write_text("ignored")
    same(tars, folder)
    same(tarred(tars, tmp_path / "again.tar"), folder)


def test_only_tars_of_the_classes_are_scanned(tars, tmp_path):
    (tars / "n03.tar").write_text("damaged")
    for path in (tars, tarred(tars, tmp_path / "train.tar")):
        fails(path, "n03.tar", "tar")
        listing = list_images(path, ["n02"])
        assert (listing.members, listing.labels, listing.class_names) == (("n02/n02_1.JPEG",), (0,), ("n02",))
        assert read(listing, SIZE, 3).shape == (1, 3, SIZE, SIZE)


def test_images_count_before_tars(tmp_path):
    folder = tree(tmp_path / "data", ["cat/a.png"])
    (folder / "backup.tar").write_text("whatever")
    (folder / "backup.tar.gz").write_text("whatever")
    for path in (folder, tarred(folder, tmp_path / "data.tar")):
        assert list_images(path).members == ("cat/a.png",)


def test_of_a_name_that_comes_twice_the_last_counts(tmp_path):
    path = tarred(tree(tmp_path / "old", ["a.png"]), tmp_path / "data.tar")
    tarred(tree(tmp_path / "new", ["b.png", "a.png"]), path, mode="a")  # as `tar --append` does
    listing = list_images(path)
    assert listing.members == ("a.png", "b.png")
    assert (read(listing, SIZE, 3)[0].permute(1, 2, 0).numpy() == noise(SIZE, SIZE, 3, seed=1)).all()


def test_a_scan_that_takes_long_shows_a_bar(tars, whole, capfd, monkeypatch):
    list_images(whole)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(archives, "_PATIENCE", 0.0)
    for path in (tars, whole):
        list_images(path)
        shown = capfd.readouterr().err
        assert all(f"scanning {name}: " in shown for name in ("n01.tar", "n03.tar"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_no_file_stays_open(tars, whole):
    before = len(os.listdir("/proc/self/fd"))
    for path in (tars, whole):
        read(list_images(path), SIZE, 3)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_tar_that_changes_after_it_was_listed(tars, whole):
    listing, parts = list_images(whole), list_images(tars)
    os.truncate(whole, listing.spans[:, 1].max() + 1)
    with raises_user_error("train.tar", "1 of 4", "shorter"):
        read(listing, SIZE, 3)
    whole.unlink()
    with raises_user_error("train.tar", "No such file"):
        read(listing, SIZE, 3)
    (tars / "n01.tar").unlink()
    with raises_user_error("2 of 4", "n01.tar", "No such file"):
        read(parts, SIZE, 3)


def test_compressed_tars(tmp_path):
    data = tarred(tree(tmp_path / "data", NAMES), tmp_path / "plain.tar").read_bytes()
    gz, xz = tmp_path / "data.tar.gz", tmp_path / "data.tar.xz"
    gz.write_bytes(gzip.compress(data))
    fails(gz, "compression")
    fails(gz.rename(tmp_path / "data.tar"), "compressed")
    xz.write_bytes(lzma.compress(data))
    fails(xz, "compression")


def test_tars_without_images(tars, tmp_path):
    fails(tar_of(tmp_path / "empty.tar", {}), "no images", ".png")
    fails(tar_of(tmp_path / "text.tar", {"cat/a.txt": b"text", "cat/.hidden.png": b"x"}), "no images", ".png")
    tar_of(tars / "n04.tar", {})
    fails(tars, "n04.tar", "no images")
    fails(tarred(tars, tmp_path / "train.tar"), "train.tar/n04.tar", "no images")
    ilsvrc = tmp_path / "ilsvrc"  # both official tars: which of them is meant?
    ilsvrc.mkdir()
    (tmp_path / "train.tar").rename(ilsvrc / "ILSVRC2012_img_train.tar")
    tar_of(ilsvrc / "ILSVRC2012_img_val.tar", {"ILSVRC2012_val_00000001.JPEG": png()})
    fails(ilsvrc, "ILSVRC2012_img_train.tar", "no images")


def test_what_is_no_tar(tmp_path):
    for data in (b"", b"text", bytes(100), noise(5000).tobytes()):
        (tmp_path / "x.tar").write_bytes(data)
        fails(tmp_path / "x.tar", "tar")


def test_a_cut_tar_is_noticed_wherever_it_is_cut(tmp_path):
    data = tarred(tree(tmp_path / "data", NAMES), tmp_path / "data.tar").read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512  # here the end mark begins
    path = tmp_path / "cut.tar"
    for length in [*range(512, end, 256), end - 1, end, end + 511]:
        path.write_bytes(data[:length])
        fails(path, "cut short")
    path.write_bytes(data[: end + 512])
    assert len(list_images(path).members) == 4


def test_a_cut_inner_tar_is_noticed(tars, tmp_path):
    os.truncate(tars / "n02.tar", 1024)
    for path in (tars, tarred(tars, tmp_path / "train.tar")):
        fails(path, "n02.tar", "cut short")


def test_damaged_headers(tmp_path):
    path = tarred(tree(tmp_path / "data", NAMES), tmp_path / "data.tar")
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        entries = archive.getmembers()
    for entry in entries:
        damaged = bytearray(whole)
        damaged[entry.offset + 20] ^= 1  # a bit of the name: the checksum tells
        path.write_bytes(damaged)
        fails(path, "damaged", "" if entry is entries[0] else f"at byte {entry.offset}")


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
    assert listing.class_names == ("cat", "secret")
    for seed, image in enumerate(read(listing, SIZE, 3), 1):  # what is in the tar, not what has that name on disk
        assert (image.permute(1, 2, 0).numpy() == noise(SIZE, SIZE, 3, seed=seed)).all()
    find_line(capfd.readouterr().err, "hostile.tar", "2 links")
    assert sorted(tmp_path.rglob("*")) == before
