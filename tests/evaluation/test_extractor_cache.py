"""Extractors that are trained once for each set of labelled images on a machine."""

import torch
from conftest import trained_once
from refusals import raises_user_error

from uvit_decay.encoders import SmallClassifier
from uvit_decay.evaluation.extractor_cache import cache_folder, prepare_extractor
from uvit_decay.evaluation.image_sources import DatasetImages, choose_reference
from uvit_decay.runtime.distributed import Processes

SHAPE, CPU = (1, 8, 8), torch.device("cpu")


def prepare(images):
    extractor = SmallClassifier()
    prepare_extractor(extractor, SHAPE, CPU, Processes(), images)
    return extractor


def test_a_classifier_is_trained_once_for_the_same_images_and_labels(digits, tmp_path, monkeypatch):
    trained_once(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = choose_reference(DatasetImages("digits-train", digits.train, 1, digits.class_names), 100)
    first = prepare(images)
    (file,) = cache_folder("classifiers").glob("*.safetensors")
    assert first.class_names == digits.class_names
    with monkeypatch.context() as untrained:
        untrained.delattr(SmallClassifier, "fit")
        untrained.setattr(SmallClassifier, "__abstractmethods__", frozenset())
        again = prepare(images)
    assert (again.fingerprint(), again.accuracy) == (first.fingerprint(), first.accuracy)
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with raises_user_error(file):
        prepare(images)
    images.labels = images.labels.flip(0)
    assert prepare(images).fingerprint() != first.fingerprint()
    assert len(list(cache_folder("classifiers").glob("*.safetensors"))) == 2
