"""Metrics of samples while training: extractors of any kind, and latents, which are decoded."""

import gc
import weakref

import pytest
import torch
from conftest import tiny_task, trained_once
from lightning.pytorch import Callback
from PIL import Image
from refusals import find_line, raises_user_error
from runs import fit, latent_task

from uvit_decay.callbacks import GenerationMetrics, LinearProbes, Preview
from uvit_decay.data import Digits, InMemory, Latents
from uvit_decay.encoders import SmallClassifier
from uvit_decay.encoders.extractors import Extractor, Features
from uvit_decay.latents.autoencoder import Autoencoder
from uvit_decay.nn import UViT
from uvit_decay.runs import history


def test_an_extractor_that_needs_no_training_images_evaluates_a_set_in_memory(tmp_path):
    class Pixels(Extractor):
        """An extractor without weights and with classes of its own, as Inception has."""

        name, widths, channels, sha256 = "pixels", {"features": 64, "logits": 10}, 1, "0"

        def prepare(self, images, labels, device) -> None:
            assert len(images) == len(labels) == 0

        def extract(self, images) -> Features:
            flat = images.flatten(1).float()
            return Features(flat, flat[:, :10] / 100)

    fit(tmp_path, GenerationMetrics(Pixels(), num=20, max_reference=50, allow_few=True), max_steps=2)
    (line,) = history.read(tmp_path / "generation.jsonl")
    assert line.values["fd"] > 0
    assert "label_consistency" not in line.values
    assert (line.metadata["samples"]["labels"], line.metadata["samples"]["clip"]) == ("all 10 classes in turn", True)


def test_the_cheap_metric_is_chosen_by_its_name_and_measured_after_an_epoch(tmp_path):
    when = {"at_end": False, "every_n_epochs": 1}
    metrics = GenerationMetrics(SmallClassifier(), num=20, max_reference=50, metrics=["mind"], **when)
    fit(tmp_path, metrics, max_steps=2, limit_train_batches=2)
    (line,) = history.read(tmp_path / "generation.jsonl")
    assert set(line.values) == {"mind", "label_consistency", "classifier_accuracy"}
    assert line.values["mind"] > 0
    assert (line.metadata["mind_projections"], line.metadata["mind_scale"]) == (1024, "3 d")
    with raises_user_error("fd,fid,fdd,is,kid,kdd,prc,sfid,mind", "best"):
        GenerationMetrics(SmallClassifier(), metrics=["best"])
    with raises_user_error("`metrics`", "fdd", "small-cnn", "fd,is,kid,prc,mind"):
        GenerationMetrics(SmallClassifier(), metrics=["fdd"])


def test_an_unknown_name_of_features_is_the_extractor():
    with raises_user_error("`extractor`", "small-cnn", "foo"):
        GenerationMetrics("foo")


def test_the_classifier_is_trained_after_the_first_steps_and_shared(tmp_path, monkeypatch):
    """The values of the test images, and its accuracy, stand beside the samples'."""
    trained_once(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trainings, begun = [], []
    train = SmallClassifier.fit

    def noted(self, *args):
        trainings.append(len(begun))
        train(self, *args)

    class Steps(Callback):
        def on_train_batch_start(self, *_):
            begun.append(None)

    monkeypatch.setattr(SmallClassifier, "fit", noted)
    for name in ("first", "second"):
        metrics = GenerationMetrics("small-cnn", num=130, max_reference=200, metrics=["fd"])
        fit(tmp_path / name, Steps(), metrics, max_steps=4, log_every_n_steps=2)
        (line,) = history.read(tmp_path / name / "generation.jsonl")
    assert trainings == [2]
    assert line.metadata["reference"]["n"] == 200
    assert set(line.metadata["ceiling"]["values"]) == {"fd", "label_consistency"}
    assert line.metadata["ceiling"]["values"]["fd"] < line.values["fd"]
    assert 0 < line.values["classifier_accuracy"] <= 1


def test_previews_and_probes_work_on_latents(encoded, tmp_path):
    data = Latents(str(encoded), str(encoded), batch_size=11, num_workers=0)
    fit(tmp_path, Preview(rows=2), LinearProbes(times=(0.1,)), max_steps=4, task=latent_task(), data=data)
    with Image.open(tmp_path / "samples.png") as grid:
        assert len(grid.getcolors(maxcolors=100_000)) > 10
    assert (tmp_path / "probes.csv").read_text().count("\n") == 5


class Colours(Extractor):
    """64 features: the mean colours of 16 places, and a constant."""

    name, widths, sha256 = "colours", {"features": 64}, "0" * 64

    def prepare(self, images, labels, device):
        """Do nothing: there are no weights."""

    def extract(self, images):
        places = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, [4, 4]).flatten(1)
        return Features(torch.cat([places, places[:, :16]], 1))


def test_samples_of_latents_are_evaluated_decoded_against_images(encoded, image_dir, tmp_path, monkeypatch):
    """The autoencoder is on the device during evaluations only."""
    copies, on = [], Autoencoder.on

    def remembered(autoencoder, device):
        copied = on(autoencoder, device)
        copies.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(Autoencoder, "on", remembered)
    data = Latents(str(encoded), batch_size=11, num_workers=0)
    trained = {"max_steps": 4, "task": latent_task(), "data": data}
    options = {"num": 12, "reference": str(image_dir), "allow_few": True, "every_n_steps": 2}
    with raises_user_error("reference"):
        fit(tmp_path / "without", GenerationMetrics(Colours(), num=12), **trained)
    metrics = GenerationMetrics(Colours(), **options)
    fit(tmp_path, metrics, **trained)
    gc.collect()
    assert [copied() for copied in copies] == [None, None]
    *_, line = history.read(tmp_path / "generation.jsonl")
    assert line.values["fd"] > 0
    assert (line.metadata["samples"]["size"], line.metadata["reference"]["size"]) == ("32x32", "32x32")
    assert any("not Inception's" in remark for remark in line.metadata["remarks"])


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (100, {}, ("100", "200")),
        (200, {}, ("200",)),
        (201, {}, ()),
        (100, {"allow_few": True}, ()),
        (100, {"reference": "elsewhere"}, ()),
    ],
)
def test_metrics_are_left_out_without_twenty_images_of_a_class(count, options, words):
    data = Digits()
    data.setup()
    data.train = InMemory(*data.train[range(count)])
    obstacle = GenerationMetrics("small-cnn", **options).find_obstacle(data)
    assert (obstacle is None) == (not words)
    assert all(word in (obstacle or "") for word in words)


def test_what_is_left_out_for_want_of_classes_says_so_and_the_rest_goes_on(tmp_path, caplog):
    data = Digits(32)
    data.load()
    data.class_names = ()
    metrics, probes = GenerationMetrics("small-cnn", num=100), LinearProbes(times=(0.1,))
    unconditional = tiny_task(UViT(8, 2, 1, dim=16, depth=2, heads=2))
    fit(tmp_path, metrics, probes, Preview(rows=1), max_steps=2, task=unconditional, data=data)
    find_line(caplog.messages, "GenerationMetrics are left out", "two classes")
    find_line(caplog.messages, "LinearProbes are left out", "classes")
    assert {path.name for path in tmp_path.glob("*.*")} == {"samples.png"}
