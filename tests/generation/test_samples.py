"""Samples as objects: labels, names, metadata and cost; sampling options without a script."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, sample
from PIL import Image
from refusals import raises_user_error

from uvit_decay.evaluation.image_sources import GeneratedImages
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.generation.samples import Samples
from uvit_decay.latents.space import LatentSpace
from uvit_decay.terminal.command_line import parse

SPACE = LatentSpace("stabilityai/sd-vae-ft-ema", "", 1.0, 0.0, channels=4, factor=8)


@pytest.fixture
def options():
    def options(sampling: SamplingOptions) -> SamplingOptions:
        return sampling

    return lambda *words: parse(options, words)()


def test_images_are_a_source_that_says_what_it_is(trained, options):
    sampled = Samples.from_options(trained, options("--steps", "3", "--guidance", "2", "--seed", "5"))
    assert sampled.shape == (1, 8, 8)
    assert sampled.labels([9, 10, 13]) == [9, 0, 3]
    together = sampled.images(range(7, 10))
    assert (together.dtype, tuple(together.shape)) == (torch.uint8, (3, 1, 8, 8))
    assert sampled.nfe == 3 * 3 * 2
    assert torch.equal(together[1:], sampled.images([8, 9]))
    assert sampled.name == "ema_dpm++3_w2_seed5"
    described = json.loads(json.dumps(sampled.metadata()))
    expected = {"step": 12, "weights": "ema", "sampler": "dpm++", "steps": 3, "nfe": 3, "guidance": 2.0, "seed": 5,
                "clip": True}  # fmt: skip
    assert expected.items() <= described.items()
    assert described["labels"] == "all 10 classes in turn"
    some = Samples.from_options(trained, options("--classes", "1,2", "--weights", "raw"))
    assert some.metadata()["labels"] == "classes 1,2 in turn"
    assert some.name == "raw_dpm++4_w2_seed0_classes1-2"


def test_a_bundled_checkpoint_is_found_from_any_folder(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Path("checkpoints/digits.safetensors")
    assert Samples.from_options(name, options()).file == ROOT / name


def test_where_to_guide_without_guidance_is_refused(trained, options):
    with raises_user_error("`guidance_interval`", "`guidance`"):
        Samples.from_options(trained, options("--guidance", "1", "--guidance-interval", "0.1,0.6"))


@pytest.mark.parametrize("classes", [[], ["--classes", "7,2,5"]])
def test_random_labels_are_functions_of_seed_and_number(trained, options, classes):
    flags = ["--steps", "2", "--labels", "random", *classes]
    sampled = Samples.from_options(trained, options(*flags))
    labels = sampled.labels(range(3000))
    assert sampled.labels([2999, 5]) == [labels[2999], labels[5]]
    assert labels != Samples.from_options(trained, options(*flags, "--seed", "1")).labels(range(3000))
    drawn = [2, 5, 7] if classes else list(range(10))
    counts = np.array([labels.count(label) for label in drawn])
    assert counts.sum() == 3000
    assert 0 < ((counts - 3000 / len(drawn)) ** 2 / (3000 / len(drawn))).sum() < 30  # chi square, 9 or 2 degrees
    alone = Samples.from_options(trained, options("--steps", "2", "--classes", str(labels[5])))
    assert torch.equal(sampled.images([5]), alone.images([5])), "the image is of its label"
    assert "_random-labels" in sampled.name
    assert sampled.metadata()["labels"].endswith("at random")


@pytest.mark.parametrize(
    ("flags", "drawn"),
    [
        ([], False),
        (["--sampler", "uvit-em"], True),
        (["--sampler", "uvit-dpm", "--labels", "balanced"], False),
        (["--labels", "random"], True),
    ],
)
def test_the_papers_samplers_draw_labels_but_for_a_grid(trained, options, tmp_path, monkeypatch, flags, drawn):
    sampled = Samples.from_options(trained, options(*flags))
    assert (sampled.labels(range(20)) != [*range(10)] * 2) is drawn
    assert ("random-labels" in sampled.name) is drawn
    base = ["--ckpt", trained, "-n", "20", "--steps", "1", *flags]
    sample(monkeypatch, tmp_path, *base, "--out", "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        assert file["arr_1"].tolist() == sampled.labels(range(20))
    sample(monkeypatch, tmp_path, *base, "--out", "grid.png")
    in_columns = "random" not in flags
    assert (Image.open(tmp_path / "grid.png").size == (10 * 68 + 4, 22 + 2 * 68 + 4)) is in_columns, "named columns"


@pytest.mark.parametrize(
    ("flags", "name", "protocol"),
    [
        ([], "ema_protocol-uvit_uvit-dpm50_w1_seed0_random-labels", "uvit"),
        (
            ["--steps", "9", "--clip", "--labels", "balanced"],
            "ema_protocol-uvit-other-steps-clip-balanced_uvit-dpm9_w1_clip_seed0",
            "uvit-other-steps-clip-balanced",
        ),
        (
            ["--sampler", "ddim", "--steps", "50", "--no-clip"],
            "ema_protocol-uvit-other-sampler_ddim50_w1_noclip_seed0_random-labels",
            "uvit-other-sampler",
        ),
    ],
)
def test_a_protocol_is_in_the_name_with_what_was_changed(trained, options, flags, name, protocol):
    sampled = Samples.from_options(trained, options("--sampling-protocol", "uvit", *flags))
    assert sampled.name == name
    reported = GeneratedImages(sampled, 4, 1)
    assert reported.metadata()["sampling_protocol"] == protocol
    assert reported.name == f"last-step12_{name}_nfe{9 if '9' in flags else 50}"


def test_names_tell_long_lists_of_classes_and_autoencoders_apart(trained, options):
    sampled = Samples.from_options(trained, options())
    lists = [[0, *range(10)], [1, *range(10)], [*range(10), 0]]
    latent = replace(sampled.checkpoint, card=replace(sampled.checkpoint.card, latents=SPACE))
    others = [replace(sampled, checkpoint=latent, vae=vae) for vae in (SPACE.vae, "elsewhere/sd-vae-ft-mse")]
    names = [other.name for other in (sampled, *(replace(sampled, classes=classes) for classes in lists), others[1])]
    assert len(set(names)) == len(names)
    assert others[0].name == sampled.name
    assert names[-1].endswith("_vae-sd-vae-ft-mse")
