"""Suggestions for mistyped words: near ones, and no poor ones."""

import pytest

from uvit_decay.terminal.suggestions import closest, did_you_mean

TRAIN = ("--config", "--model.optim.lr", "--data.batch_size", "--data.image_size", "--model.net.image_size")
SAMPLE = ("--ckpt", "--num", "-n", "--out", "--guidance", "--steps", "--batch-size", "--weights")


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("--lr", TRAIN, ["--model.optim.lr"]),
        ("--batch_siez", SAMPLE, ["--batch-size"]),
        ("--image_size", TRAIN, ["--data.image_size", "--model.net.image_size"]),
        ("--model.image_size", TRAIN, ["--model.net.image_size", "--data.image_size"]),
        ("--wieghts", SAMPLE, ["--weights"]),
        ("fti", ("fit", "validate"), ["fit"]),
        ("linear", ("Linear", "LinearProbes"), ["Linear"]),
        ("--magic", SAMPLE, []),
        ("anything", (), []),
    ],
)
def test_near_words_are_found_and_poor_ones_are_not(word, known, found):
    assert closest(word, known) == found
    hint = did_you_mean(word, known)
    assert bool(hint) == bool(found)
    assert all(name in hint for name in found)
