"""The model card: written and read by every format, of this version and those before it."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from official_files import described, imported, redescribe, tiny

from uvit_decay.checkpoint import ModelCard, load, read_training_checkpoint
from uvit_decay.checkpoint.card import VERSION
from uvit_decay.checkpoint.convert import export_file
from uvit_decay.checkpoint.io import read
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.runtime.errors import UserError

BEFORE = ROOT / "tests" / "written_before"


def test_a_card_is_the_same_after_a_file_of_either_format(trained, tmp_path):
    card = ModelCard.from_dict(read_training_checkpoint(trained)["uvit_decay"], trained)
    assert (card.step, card.weighting, card.pieces, card.weights, card.noise_path()) == (12, "none", 1, None, VP())
    assert ModelCard.from_dict(json.loads(json.dumps(card.to_dict())), "x") == card
    export_file(trained, tmp_path / "model.safetensors", "raw")
    assert read(tmp_path / "model.safetensors", None).card == replace(card, weights="raw") == read(trained, "raw").card


def test_an_imported_file_has_a_card_without_what_nobody_knows(tmp_path):
    imported(tiny(), tmp_path)
    card = read(tmp_path / "ours.safetensors", None).card
    assert (card.weighting, card.class_hash, card.latents, card.weights) == (None, None, None, "ema")
    assert described(tmp_path / "ours.safetensors").keys().isdisjoint({"weighting", "class_hash", "latents"})


@pytest.mark.parametrize("name", ["uvit.ckpt", "sit.ckpt", "uvit.safetensors", "sit.safetensors", "run/last.ckpt"])
def test_cards_of_before_have_no_version_and_are_written_with_one(name):
    path = BEFORE / name
    if path.suffix == ".ckpt":
        assert "version" not in torch.load(path, weights_only=True)["uvit_decay"]
    card = read(path, None).card
    assert card.to_dict()["version"] == VERSION
    assert ModelCard.from_dict(card.to_dict(), path) == card


@pytest.mark.parametrize("version", [VERSION + 1, "1", None, 1.5, 10**30])
def test_a_newer_version_is_one_line_that_says_what_to_do(trained, tmp_path, version):
    path = tmp_path / "model.safetensors"
    export_file(trained, path)
    redescribe(path, version=version)
    expected = "has version 2, known are those up to 1: update uvit_decay" if version == 2 else "version must be int"
    with pytest.raises(UserError, match=f"^{path} is damaged, or of another version of .*{expected}"):
        load(path)


def test_entries_that_are_no_fields_are_ignored(trained):
    values = read_training_checkpoint(trained)["uvit_decay"]
    assert ModelCard.from_dict(values | {"colour": "blue"}, "x") == ModelCard.from_dict(values, "x")


def test_a_card_of_an_encoder_has_no_path_and_one_of_a_denoiser_all_of_its_parts(trained):
    values = read_training_checkpoint(trained)["uvit_decay"]
    encoder = {name: value for name, value in values.items() if name not in ("path", "prediction", "sampling")}
    card = ModelCard.from_dict(encoder, "x")
    assert (card.path, card.prediction, card.sampling, card.noise_path()) == (None, None, None, None)
    assert ModelCard.from_dict(card.to_dict(), "x") == card
    assert card.to_dict().keys().isdisjoint({"path", "prediction", "sampling"})
    for name in ("path", "prediction", "sampling"):
        with pytest.raises(UserError, match=f"its model card lacks {name}, a denoiser has path, prediction and sam"):
            ModelCard.from_dict({key: value for key, value in values.items() if key != name}, "x")
