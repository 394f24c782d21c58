"""Folders, zips and tars of images: how they are listed, read, and refused; test_archives.py has more of tars."""

import pickle
from itertools import product
from pathlib import Path

import pytest
import torch
from image_noise import SIZE, fails, noise, tree, write_tar, write_zip
from refusals import raises_user_error
from torch.utils.data import DataLoader

from uvit_decay.data.decoding import Decoding
from uvit_decay.data.labels import LabelOptions
from uvit_decay.data.listing import list_images
from uvit_decay.data.reading import read

CLASSES = ["dog/b.png", "cat/a.PNG", "cat/c.Bmp", "dog/a.webp", "ant/x.tiff"]


def test_folder_zip_and_tar_are_the_same(tmp_path):
    folder = tree(tmp_path / "data", CLASSES)
    (folder / "cat" / "notes.txt").write_text("not an image")
    (folder / "labels.h5").write_bytes(b"PIL knows the extension but cannot decode it")
    for junk in (".hidden.png", "cat/._a.PNG", "__MACOSX/cat/a.png", ".git/x.png", "cat/Thumbs.db"):
        (folder / junk).parent.mkdir(parents=True, exist_ok=True)
        (folder / junk).write_bytes(b"junk")
    listing = list_images(folder)
    assert listing.members == ("ant/x.tiff", "cat/a.PNG", "cat/c.Bmp", "dog/a.webp", "dog/b.png")
    assert listing.class_names == ("ant", "cat", "dog")
    assert listing.labels == (0, 1, 1, 2, 2)
    pixels = read(listing, Decoding(SIZE, 3))
    assert (pixels[1].numpy() == noise(SIZE, SIZE, 3, seed=1).transpose(2, 0, 1)).all()
    for pack, prefix in product((write_zip, write_tar), ("", "wrapper/", "./", "outer/inner/")):
        other = list_images(pack(folder, tmp_path / f"{len(prefix)}.{pack.__name__}", prefix))
        assert other.members == tuple(prefix + member for member in listing.members)
        assert (other.labels, other.class_names) == (listing.labels, listing.class_names)
        assert torch.equal(read(other, Decoding(SIZE, 3)), pixels)


def test_flat_images_have_no_classes(tmp_path):
    folder = tree(tmp_path / "flat", ["b.png", "a.png"])
    expected = (("a.png", "b.png"), (0, 0), ())
    for path in (
        folder,
        str(folder),
        write_zip(folder, tmp_path / "flat.zip"),
        write_tar(folder, tmp_path / "flat.tar"),
    ):
        listing = list_images(path)
        assert (listing.members, listing.labels, listing.class_names) == expected


def test_nested_folders_and_links(tmp_path):
    folder = tree(tmp_path / "nested", ["animals/cat/a.png", "things/car/b.png"])
    tree(tmp_path / "elsewhere", ["c.png"])
    (folder / "bee").symlink_to(tmp_path / "elsewhere")
    listing = list_images(folder)
    assert listing.class_names == ("animals", "bee", "things")
    assert listing.members == ("animals/cat/a.png", "bee/c.png", "things/car/b.png")
    lowest = LabelOptions("leaf")
    listing = list_images(folder, None, lowest)
    assert listing.class_names == ("bee", "car", "cat")
    assert listing.labels == (2, 0, 1)  # by the name of the class, not by the path
    assert list_images(folder, ["cat", "bee"], lowest).labels == (1, 0)


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (["a.png", "cat/b.png"], "auto"),
        (["w/a.png", "w/cat/b.png"], "leaf"),
        (["cat/a.png", "cat/x/y/b.png"], "leaf"),
    ],
)
def test_flat_and_foldered_do_not_mix(tmp_path, names, source):
    folder = tree(tmp_path / "mixed", names)
    with raises_user_error(folder, str(Path(names[1]).parent)):
        list_images(folder, None, LabelOptions(source))
    assert list_images(folder, None, LabelOptions(None)).class_names == ()


def test_paths_that_are_no_sets_of_images(tmp_path):
    fails(tmp_path / "missing", "no such")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "no images", ".png")
    fails(write_zip(tmp_path / "empty", tmp_path / "empty.zip"), "no images", ".png")
    (tmp_path / "x.npz").write_text("text")
    fails(tmp_path / "x.npz", "folder", "zip", "tar")
    fails(tmp_path, "1 .npz", "HubDataset")
    whole = write_zip(tree(tmp_path / "data", CLASSES), tmp_path / "whole.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    fails(tmp_path / "cut.zip", "cut short")


def test_indices(tmp_path):
    folder = tree(tmp_path / "data", [f"{i:03}.png" for i in range(150)])
    for path in (folder, write_zip(folder, tmp_path / "data.zip"), write_tar(folder, tmp_path / "data.tar")):
        listing = list_images(path)
        whole = read(listing, Decoding(SIZE, 3))
        assert whole.shape == (150, 3, SIZE, SIZE)
        assert whole.dtype == torch.uint8
        assert all((whole[i].numpy().transpose(1, 2, 0) == noise(SIZE, SIZE, 3, seed=i)).all() for i in range(150))
        assert torch.equal(read(listing, Decoding(SIZE, 3), indices=[7, 2, 7]), whole[[7, 2, 7]])
        assert read(listing, Decoding(SIZE, 1), indices=[]).shape == (0, 1, SIZE, SIZE)


def test_broken_images_are_counted_in_the_set_and_named(tmp_path):
    folder = tree(tmp_path / "data", [f"cat/{i:02}.jpg" for i in range(40)], size=64)
    whole = (folder / "cat/07.jpg").read_bytes()
    (folder / "cat/07.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "cat/31.jpg").write_text("text")
    (folder / "cat/32.jpg").write_bytes(b"")
    for path in (folder, write_zip(folder, tmp_path / "data.zip"), write_tar(folder, tmp_path / "data.tar")):
        with raises_user_error(path, "3 of 40", "cat/07.jpg", "truncated"):
            read(list_images(path), Decoding(SIZE, 3))
        with raises_user_error("at least 2 of 40", "cat/31.jpg"):
            read(list_images(path), Decoding(SIZE, 3), indices=[31, 32])


def test_damage_inside_a_zip_and_missing_files(tmp_path):
    folder = tree(tmp_path / "data", ["a.png", "b.png"], size=64)
    path = write_zip(folder, tmp_path / "data.zip")
    data = bytearray(path.read_bytes())
    data[2000:2010] = bytes(10)  # in the middle of b.png, which was written first
    path.write_bytes(data)
    with raises_user_error("1 of 2", "b.png"):
        read(list_images(path), Decoding(SIZE, 3))
    listing = list_images(folder)
    (folder / "a.png").unlink()
    with raises_user_error("1 of 2", "a.png", "No such file"):
        read(listing, Decoding(SIZE, 3))


def test_a_replaced_zip_is_read_anew(tmp_path):
    path = write_zip(tree(tmp_path / "one", ["a.png"]), tmp_path / "data.zip")
    assert list_images(path).members == ("a.png",)
    write_zip(tree(tmp_path / "two", ["b.png", "c.png"]), path)
    assert list_images(path).members == ("b.png", "c.png")


@pytest.mark.parametrize("pack", [write_zip, write_tar])
def test_worker_processes(tmp_path, pack):
    folder = tree(tmp_path / "data", [f"{i:03}.png" for i in range(120)])
    listing = list_images(pack(folder, tmp_path / "packed"))
    sent = pickle.loads(pickle.dumps(listing))
    assert sent == listing
    whole = read(listing, Decoding(SIZE, 3))  # the parent's zip is open when the workers start
    assert torch.equal(read(sent, Decoding(SIZE, 3)), whole)
    options = {"batch_size": 8, "num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(
        range(120), **options, collate_fn=lambda indices: read(listing, Decoding(SIZE, 3), indices=indices)
    )
    assert torch.equal(torch.cat(list(loader)), whole)
    assert torch.equal(read(listing, Decoding(SIZE, 3)), whole)
