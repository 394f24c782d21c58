"""Lists of classes: the bundled ones, files of one's own, and images of these classes alone."""

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from image_noise import SIZE, class_tars, tarred, tree, zipped

from uvit_decay.class_names import class_hash, class_list
from uvit_decay.data import Images
from uvit_decay.data.image_files import list_images, read, select
from uvit_decay.runtime.errors import UserError

ORIGINAL = ROOT.parent / "shared" / "data" / "imagenet100-synsets.txt"


def fails(call, *args, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


# --- lists -----------------------------------------------------------------------------------------------------------


def test_imagenet():
    all_of_it, hundred = class_list("imagenet-1k"), class_list("imagenet-100/cmc")
    assert (len(set(all_of_it)), len(set(hundred))) == (1000, 100)
    assert set(hundred) < set(all_of_it)
    assert (all_of_it[0], all_of_it[-1]) == ("n01440764", "n15075141")
    assert (hundred[0], hundred[-1]) == ("n01558993", "n13040303")
    for names in (all_of_it, hundred):
        assert list(names) == sorted(names)
        assert all(len(name) == 9 and name[0] == "n" and name[1:].isdigit() for name in names)
    # grep -v '#' FILE | sort | head -c -1 | sha256sum
    assert class_hash(hundred) == "d61d354b64beb3ce2c2c9cf04a874298362dc9fcd589e15ee34c5e4592145746"
    assert class_hash(all_of_it) == "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"


@pytest.mark.skipif(not ORIGINAL.exists(), reason="the original list is not here")
def test_cmc_is_the_original():
    assert class_list("imagenet-100/cmc") == tuple(sorted(ORIGINAL.read_text().split()))


def test_a_file(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\ufeff# mine\n\n zebra \r\nant\n\t# indented\nguinea pig\nc#", encoding="utf-8")
    for path in (file, str(file)):
        assert class_list(path) == ("ant", "c#", "guinea pig", "zebra")


def test_what_is_no_list(tmp_path):
    fails(class_list, "imagenet-100", words=("imagenet-100:", "imagenet-100/cmc, imagenet-1k", "text file"))
    fails(class_list, tmp_path / "missing.txt", words=("missing.txt", "imagenet-1k"))
    fails(class_list, tmp_path, words=(str(tmp_path), "is no file"))
    file = tmp_path / "mine.txt"
    for data, words in {
        b"# nothing\n": ("no class",),
        b"\xff\xfe\x00": ("utf-8",),
        b"cat\n\ndog\n cat \n": ("class cat", "lines 1 and 4"),
    }.items():
        file.write_bytes(data)
        fails(class_list, file, words=(str(file), *words))


def test_hash():
    assert class_hash(("ant", "zebra")) == sha256(b"ant\nzebra").hexdigest()
    assert class_hash(("zebra", "ant")) != class_hash(("ant", "zebra"))


# --- images of these classes ---------------------------------------------------------------------------------------

NAMES = ["bee/2.png", "ant/1.png", "dog/3.png", "cat/4.png", "bee/1.png", "dog/1.png"]


@pytest.fixture
def places(tmp_path) -> list[Path]:
    folder = tree(tmp_path / "data", NAMES)
    tars = class_tars(folder, tmp_path / "tars")
    packed = zipped(folder, tmp_path / "data.zip"), tarred(folder, tmp_path / "data.tar")
    return [folder, *packed, tars, tarred(tars, tmp_path / "tars.tar")]


def test_only_these_classes(places):
    for path in places:
        listing = list_images(path)
        for chosen in (list_images(path, ["dog", "bee"]), select(listing, ("bee", "dog"))):
            assert chosen.members == ("bee/1.png", "bee/2.png", "dog/1.png", "dog/3.png")
            assert (chosen.labels, chosen.class_names) == ((0, 0, 1, 1), ("bee", "dog"))
            rows = [listing.members.index(member) for member in chosen.members]
            assert torch.equal(read(chosen, SIZE, 3), read(listing, SIZE, 3)[rows])
        assert select(listing, listing.class_names) == listing


def test_the_label_is_the_rank_of_the_name_and_not_of_the_path(tmp_path):
    folder = tree(tmp_path / "data", ["a/zebra/1.png", "b/ant/1.png", "c/bee/1.png"])
    assert list_images(folder).labels == (2, 0, 1)
    assert list_images(folder, ["zebra", "bee"]).labels == (1, 0)


def test_classes_without_images(places, tmp_path):
    for path in places:
        words = (f"{path}: no images of 2 of the 3 classes", "the first is cow;")
        fails(list_images, path, ["eel", "bee", "cow"], words=words)
    flat = tree(tmp_path / "flat", ["a.png"])
    fails(list_images, flat, ["bee"], words=("no images of 1 of the 1 classes", "bee"))


def test_images_of_a_class_list(places, tmp_path):
    (tmp_path / "two.txt").write_text("dog\nbee\n")
    test = tree(tmp_path / "test", ["dog/9.png", "eel/9.png", "bee/9.png"])
    for path in places:
        data = Images(str(path), str(test), classes=str(tmp_path / "two.txt"), image_size=SIZE, batch_size=2)
        data.load()
        assert data.class_names == ("bee", "dog")
        assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 1, 1], [0, 1])
        assert data.name.startswith(path.stem)
        assert "two.txt" in data.name
    fails(Images(str(path), classes="imagenet-100/cmc").load, words=("100 of the 100 classes", "n01558993"))
    fails(Images(str(path), classes="imagenet-200").load, words=("imagenet-200", "imagenet-1k"))
    tree(tmp_path / "less", ["dog/9.png"])
    less = Images(str(path), str(tmp_path / "less"), classes=str(tmp_path / "two.txt"), image_size=SIZE)
    fails(less.load, words=(str(tmp_path / "less"), "1 of the 2", "bee"))


@pytest.mark.parametrize("names", [("",), ("a", ""), ("a\nb",), ("caf\udce9",), ("\x1b[2J",)])
def test_names_that_cannot_be_shown_or_told_apart_are_refused(names):
    """One class without a name could not be told from none, one of two lines not from two."""
    with pytest.raises(UserError, match=r"^[ -~]*is empty, no UTF-8 or has control characters"):
        class_hash(names)
