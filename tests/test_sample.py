"""sample.py as a user runs it: the files that it writes, and what it refuses."""

import hashlib

import numpy as np
import pytest
import yaml
from conftest import ROOT, sample
from official_files import change_training
from PIL import Image
from refusals import find_line, refused


def test_the_page_of_models_shows_what_the_bundled_checkpoint_makes(tmp_path, monkeypatch):
    sample(monkeypatch, tmp_path, "--num", 20)
    sampled, shown = (np.asarray(Image.open(path), float) for path in ("samples.png", ROOT / "docs/digits_samples.png"))
    assert abs(sampled - shown).mean() < 0.1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "b.jpg"], (".png", ".npz", "folder")),
        (["--out", "full"], ("full", "empty")),
        (["--num", "10001"], ("grid", 10000)),
        (["--device", "hpu"], "--device hpu"),  # whose package is not installed
        (["--sampling-protocol", "sit"], ("protocol sit", "Linear", "GVP", "VP")),
        (["--ckpt", "missing.ckpt"], ("missing.ckpt", "exist")),
        (["--vae", "somewhere"], "pixels"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(trained, tmp_path, monkeypatch, capsys, args, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old.png").touch()
    find_line(refused(capsys, sample, monkeypatch, tmp_path, "--ckpt", trained, *args), message)


def test_a_bundled_checkpoint_is_what_its_card_says():
    cards = yaml.safe_load((ROOT / "checkpoints" / "cards.yaml").read_text())
    assert len(cards) == len([*(ROOT / "checkpoints").glob("*.safetensors")])
    for card in cards.values():
        path = ROOT / "checkpoints" / card["file"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == card["sha256"]
        assert path.stat().st_size < 8 * 10**6


@pytest.mark.parametrize("out", ["samples.png", "samples.npz", "images"])
def test_images_that_are_not_finite_are_not_written(trained, tmp_path, monkeypatch, capsys, out):
    def diverge(contents):
        contents["callbacks"]["EMA"]["shadow"]["decoder_pred.weight"].fill_(3e38)

    path = change_training(trained, tmp_path, diverge)
    error = refused(capsys, sample, monkeypatch, tmp_path, "--ckpt", path, "--num", 2, "--out", out)
    find_line(error, "NaN")
    there = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert there <= {path.name, "sampling.json"}  # the latter says what the folder was to hold
