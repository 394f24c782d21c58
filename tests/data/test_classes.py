"""Classes: lists of them, images of these classes alone, and their names in words."""

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from image_noise import SIZE, fails, tree, write_tar, write_zip
from official_files import change_training
from refusals import raises_user_error

from uvit_decay.data import Images
from uvit_decay.data.classes import class_hash, class_list, class_numbers, in_words, synonyms
from uvit_decay.data.decoding import Decoding
from uvit_decay.data.listing import list_images, select
from uvit_decay.data.reading import read
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.generation.samples import Samples

IMAGENET = class_list("imagenet-1k")


def test_imagenet():
    all_of_it, hundred = class_list("imagenet-1k"), class_list("imagenet-100/cmc")
    assert (len(all_of_it), len(hundred)) == (1000, 100)
    assert set(hundred) < set(all_of_it)
    # grep -v '#' FILE | sort | head -c -1 | sha256sum
    assert class_hash(hundred) == "d61d354b64beb3ce2c2c9cf04a874298362dc9fcd589e15ee34c5e4592145746"
    assert class_hash(all_of_it) == "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"


def test_a_file(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\ufeff# mine\n\n zebra \r\nant\n\t# indented\nguinea pig\nc#", encoding="utf-8")
    for path in (file, str(file)):
        assert class_list(path) == ("ant", "c#", "guinea pig", "zebra")


def test_what_is_no_list(tmp_path):
    fails("imagenet-100", "imagenet-100/cmc, imagenet-1k", "text file", look=class_list)
    fails(tmp_path / "missing.txt", "imagenet-1k", look=class_list)
    fails(tmp_path, "file", look=class_list)
    file = tmp_path / "mine.txt"
    for data, words in {
        b"# nothing\n": ("classes",),
        b"\xff\xfe\x00": ("utf-8",),
        b"cat\n\ndog\n cat \n": ("cat", "2"),
    }.items():
        file.write_bytes(data)
        fails(file, *words, look=class_list)


def test_hash():
    assert class_hash(("ant", "zebra")) == sha256(b"ant\nzebra").hexdigest()
    assert class_hash(("zebra", "ant")) != class_hash(("ant", "zebra"))


NAMES = ["bee/2.png", "ant/1.png", "dog/3.png", "cat/4.png", "bee/1.png", "dog/1.png"]


@pytest.fixture
def places(tmp_path) -> list[Path]:
    folder = tree(tmp_path / "data", NAMES)
    packed = write_zip(folder, tmp_path / "data.zip"), write_tar(folder, tmp_path / "data.tar")
    return [folder, *packed]


def test_only_these_classes(places):
    for path in places:
        listing = list_images(path)
        for chosen in (list_images(path, ["dog", "bee"]), select(listing, ("bee", "dog"))):
            assert chosen.members == ("bee/1.png", "bee/2.png", "dog/1.png", "dog/3.png")
            assert (chosen.labels, chosen.class_names) == ((0, 0, 1, 1), ("bee", "dog"))
            rows = [listing.members.index(member) for member in chosen.members]
            assert torch.equal(read(chosen, Decoding(SIZE, 3)), read(listing, Decoding(SIZE, 3))[rows])
        assert select(listing, listing.class_names) == listing


def test_classes_without_images(places, tmp_path):
    def look(path):
        return list_images(path, ["eel", "bee", "cow"])

    for path in places:
        fails(path, "2 of the 3", "cow", look=look)
    fails(tree(tmp_path / "flat", ["a.png"]), "3 of the 3", "bee", look=look)


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
    fails(
        path, "100 of the 100 classes", "n01558993", look=lambda path: Images(path, classes="imagenet-100/cmc").load()
    )


@pytest.mark.parametrize("names", [("",), ("a", ""), ("a\nb",), ("caf\udce9",), ("\x1b[2J",)])
def test_names_that_cannot_be_shown_or_told_apart_are_refused(names):
    """One class without a name could not be told from none, one of two lines not from two."""
    with raises_user_error("UTF-8"):
        class_hash(names)


def test_ids_of_wordnet_are_said_in_words_and_other_names_as_they_are():
    assert synonyms("n01440764") == ("tench", "Tinca tinca")
    words = ("tench n01440764", "cat", "n99999999", "3", "tench tench, Tinca tinca")
    assert in_words(["n01440764", "cat", "n99999999", "3", "tench, Tinca tinca"]) == words
    assert in_words(["cat", "dog, hound"]) == ("cat", "dog")


def test_all_classes_of_imagenet_have_different_words():
    words = in_words(IMAGENET)
    assert len(set(words)) == 1000
    shown = [words[number] for number in (0, 2, 134, 999)]
    assert shown == ["tench", "great white shark", "crane n02012849", "toilet tissue"]


def test_classes_are_given_by_number_id_or_word():
    wanted = ["Tinca tinca", "5", "n01443537", "GREAT WHITE SHARK", "999"]
    assert class_numbers(wanted, IMAGENET) == [0, 5, 1, 2, 999]
    assert class_numbers(["7", "3"], "0123456789") == [7, 3]
    folders = sorted(map(str, range(12)))
    assert class_numbers(["2", "10", "-1"], [*folders, "-1"]) == [4, 2, 12], "names that are numbers come first"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tenhc", ("tenhc", "tench")),
        ("crane", (2, "134 (n02012849)", "517 (n03126707)")),
        ("xyzzy", ("xyzzy", "tench", "goldfish")),
        ("1000", ("`classes` 1000", "0 to 999")),
    ],
)
def test_a_class_that_is_unknown_or_not_alone_is_refused_with_others(word, message):
    for words in ([word], ["tench", word]):
        with raises_user_error(message):
            class_numbers(words, IMAGENET)


def test_a_checkpoint_of_imagenet_samples_classes_by_their_words(trained, tmp_path):
    names = list(IMAGENET[:10])
    path = change_training(trained, tmp_path, lambda contents: contents["uvit_decay"].update(class_names=names))
    options = SamplingOptions(classes=("tench", "7", "goldfish"), steps=2, device="cpu")
    assert Samples.from_options(path, options).classes == [0, 7, 1]
