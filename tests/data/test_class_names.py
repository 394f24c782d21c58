"""Names of classes: WordNet ids in words, and classes that are given by names."""

import pytest
from official_files import change_training
from refusals import raises_user_error

from uvit_decay.data.classes import class_list, class_numbers, in_words, synonyms
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.generation.samples import Samples

IMAGENET = class_list("imagenet-1k")


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
