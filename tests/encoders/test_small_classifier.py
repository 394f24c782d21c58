"""The small classifier, on the digits."""

import re

import pytest
import torch

from uvit_decay.encoders import Features, SmallClassifier, small_classifier

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits(digits):
    """Train and test images and labels."""
    return digits.train.images, digits.train.labels, digits.test.images, digits.test.labels


def prepared(digits):
    classifier = SmallClassifier()
    classifier.prepare(digits[0], digits[1], CPU)
    return classifier


@pytest.fixture(scope="module")
def few(digits):
    return tuple(part[:200] for part in digits)


@pytest.fixture
def short(monkeypatch):
    """Limit trainings to one cycle."""
    monkeypatch.setattr(small_classifier, "CYCLES", 1)


@pytest.fixture(scope="module")
def classifier(few):
    return prepared(few)


def same(one: Features, other: Features):
    return torch.equal(one.features, other.features) and torch.equal(one.logits, other.logits)


@pytest.mark.slow
def test_the_classifier_reads_the_digits(digits):
    _, _, images, labels = digits
    classifier = prepared(digits)
    accuracy = (classifier(images).logits.argmax(1) == labels).double().mean()
    assert accuracy >= 0.98
    assert classifier.accuracy == pytest.approx(float(accuracy), abs=0.015)
    assert classifier.needs_labels


def test_features_are_float32_rows_of_the_promised_width(classifier, digits):
    outputs = classifier(digits[2][:7])
    assert outputs.features.shape == (7, classifier.widths["features"]) == (7, 64)
    assert outputs.logits.shape == (7, 10)
    assert outputs.features.dtype == outputs.logits.dtype == torch.float32
    assert not outputs.features.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert same(classifier(digits[2][:7]), outputs)
    parts = torch.cat([classifier(part).features for part in digits[2][:7].split(3)])
    assert torch.allclose(parts, outputs.features, atol=1e-5)
    assert (SmallClassifier().channels, classifier.channels, classifier.widths["logits"]) == (None, 1, 10)
    assert not any(module.training for module in classifier.net.modules())


def test_training_is_deterministic_and_leaves_the_global_stream_alone(few, short):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = prepared(few)
    assert torch.equal(torch.rand(3), expected)
    with torch.inference_mode():  # where Lightning calls it in a validation
        second = prepared(few)
    assert same(first(few[2]), second(few[2]))
    assert first.fingerprint() == second.fingerprint()
    assert re.fullmatch(r"small-cnn-2-[0-9a-f]{12}", first.fingerprint())
    other = prepared((few[0].flip(0), few[1].flip(0)))
    assert other.fingerprint() != first.fingerprint()
    assert not same(first(few[2]), other(few[2]))


def test_training_says_nothing_of_several_gpus_and_leaves_their_random_states(digits, monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # without one, `fork_rng()` fails after its warning
    monkeypatch.setattr(small_classifier, "_train", lambda *_: (small_classifier._build_network(1, 10, False), 0.5))
    prepared(digits)
    assert not [warning for warning in recwarn if "fork" in str(warning.message) or "CUDA" in str(warning.message)]


def test_training_ends_when_the_held_out_images_are_classified_no_better(digits, few, monkeypatch):
    """With the weights of the best cycle, which a stored state restores, and the accuracy."""
    monkeypatch.setattr(small_classifier, "GAIN", 1.0)  # no cycle improves as much
    one = prepared(few)
    monkeypatch.setattr(small_classifier, "CYCLES", 1)
    assert same(one(digits[2]), prepared(few)(digits[2]))
    monkeypatch.undo()
    longer = prepared(few)
    assert longer.accuracy >= one.accuracy > 0.1
    again = SmallClassifier()
    again.load(longer.state())
    assert (again.fingerprint(), again.accuracy, again.channels) == (longer.fingerprint(), longer.accuracy, 1)


def test_large_images_are_averaged_down(digits, monkeypatch):
    monkeypatch.setattr(small_classifier, "CYCLES", 1)
    enlarged = digits[0][:50].repeat_interleave(8, -1).repeat_interleave(8, -2)  # 64x64
    small = digits[0][:50].repeat_interleave(4, -1).repeat_interleave(4, -2)
    one, other = SmallClassifier(), SmallClassifier()
    one.prepare(enlarged, digits[1][:50], CPU)
    other.prepare(small, digits[1][:50], CPU)
    assert one.fingerprint() == other.fingerprint()
    assert same(one(enlarged[:4]), other(small[:4]))
