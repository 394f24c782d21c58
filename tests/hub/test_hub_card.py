"""README.md of exported folders: metadata of the Hub, an example that runs, the licence."""

import os
import re

import pytest
from hub_folders import BUNDLED, export, own_modules, sample_pixels, stack_pictures, write_denoiser  # noqa: F401
from huggingface_hub import ModelCard
from official_files import import_and_load, tiny
from refusals import find_line

from uvit_decay.checkpoint import load
from uvit_decay.commands.convert import main
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.hub.folder import escape, model_card
from uvit_decay.nn import SiT


def test_the_example_runs_and_metadata_are_those_of_the_hub(tmp_path, monkeypatch):
    export(BUNDLED, tmp_path / "digits", license="cc-by-4.0")
    card = ModelCard.load(tmp_path / "digits" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("diffusers", "unconditional-image-generation")
    assert card.data.license == "cc-by-4.0"
    assert {"uvit", "decayed-identity-shortcuts", "class-conditional"} <= set(card.data.tags)
    assert "makes pixels, 8x8, with" in card.text
    assert "alpha from 1 to 0.7" in card.text
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], scope)
    assert (stack_pictures(scope["images"]) == sample_pixels(BUNDLED, range(4))).all()


def test_licence_of_imported_weights_is_their_publishers(tmp_path):
    card = model_card(import_and_load(tiny(), tmp_path), "net")
    assert card.data.license == "unknown"
    assert "The weights: that of their publisher" in card.text


def test_a_name_leaves_text_and_example_whole(tmp_path):
    net = SiT(4, 2, 3, dim=16, depth=2, heads=2, alpha_min=0.8)
    file = write_denoiser(tmp_path / "net.safetensors", net, VP(), "eps", Sampling("euler", 2))
    text = model_card(load(file), "it's `mine`").text
    assert "# it's \\`mine\\`" in text
    assert escape("a\n b|c") == "a b\\|c"
    escape("half of \ud83d").encode()  # a lone surrogate, which no file in UTF-8 can hold
    assert escape("\x1b[31mred\x9b").isprintable()
    compile(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], "README.md", "exec")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", BUNDLED, "out.safetensors", "--license", "mit"], "--license"),
        (["export", BUNDLED, "x.pth", "--to", "timm", "--vae", "x"], "--vae"),
        (["export", BUNDLED, "folder", "--to", "diffusers", "--license", "My own!"], ("--license", "Hub")),
    ],
)
def test_wrong_options_are_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    find_line(capsys.readouterr().err, message)
    assert not os.listdir(tmp_path)
