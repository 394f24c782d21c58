"""Official files from ours and back: nothing is lost without a word."""

from dataclasses import asdict

import pytest
import torch
from conftest import same
from official_files import CASES, described, imported, ours, redescribe, saved, tiny, unrecorded
from safetensors.torch import load_file
from uvit_reference import official_shapes, random_state

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file, import_official
from uvit_decay.checkpoint.official.common import ImportOptions
from uvit_decay.diffusion.noise_path import SDDiscrete
from uvit_decay.runtime.errors import UserError


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_official_to_ours_to_official_is_equal(tmp_path, options):
    state = tiny(**options)
    imported(state, tmp_path)
    assert export_file(tmp_path / "ours.safetensors", tmp_path / "back.pth") == unrecorded("heads 2")
    assert same(torch.load(tmp_path / "back.pth", weights_only=True), state)


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_ours_to_official_to_ours_is_equal(trained, tmp_path, weights):
    note = export_file(trained, tmp_path / "official.pth", weights)
    assert note == unrecorded("heads 2, alpha_min 0.7")
    bare = torch.load(tmp_path / "official.pth", weights_only=True)
    assert set(bare) == set(official_shapes(8, 2, 1, 16, 2, num_classes=10))
    import_official(
        tmp_path / "official.pth", tmp_path / "back.safetensors", weights, ImportOptions(heads=2, alpha_min=0.7)
    )
    back, ours = load(tmp_path / "back.safetensors"), load(trained, weights)
    assert same(back.net.state_dict(), ours.net.state_dict())
    assert (back.card.weights, back.card.class_names, back.path) == (weights, ours.card.class_names, ours.path)


def test_a_safetensors_file_is_exported_again(trained, tmp_path):
    export_file(trained, tmp_path / "first.safetensors", "raw")
    export_file(tmp_path / "first.safetensors", tmp_path / "second.safetensors")
    assert described(tmp_path / "second.safetensors") == described(tmp_path / "first.safetensors")
    assert same(load_file(tmp_path / "second.safetensors"), load_file(tmp_path / "first.safetensors"))
    with pytest.raises(UserError, match="holds raw weights, not ema"):
        export_file(tmp_path / "first.safetensors", tmp_path / "official.pth", "ema")
    with pytest.raises(UserError, match="would replace the file that is read"):
        export_file(tmp_path / "first.safetensors", tmp_path / "." / "first.safetensors")


def test_the_whole_decay_is_named_where_it_is_lost(tmp_path):
    path = ours(tmp_path, alpha_min=0.6, schedule="cosine", branches="mlp")
    assert export_file(path, tmp_path / "official.pth") == unrecorded(
        "heads 2, alpha_min 0.6, schedule cosine, branches mlp"
    )
    assert export_file(ours(tmp_path, granularity="block"), tmp_path / "official.pth") == unrecorded("heads 2"), (
        "all alphas are 1"
    )


def test_all_that_an_import_would_guess_wrong_is_named_where_it_is_lost(tmp_path):
    path = ours(tmp_path, channels=4, num_classes=20, time_scale=1000.0)
    latents = {"vae": "my/vae", "sha256": "", "scale": 0.13, "shift": 0.0, "channels": 4, "factor": 8}
    path_spec = {"class_path": "uvit_decay.diffusion.noise_path.SDDiscrete", "init_args": asdict(SDDiscrete())}
    redescribe(path, latents=latents, path=path_spec, prediction="x")
    note = export_file(path, tmp_path / "official.pth")
    parts = ("num_classes 20", "null_label True", "time_scale 1000", "prediction x", "SDDiscrete", "my/vae", "0.13")
    assert all(lost in note for lost in parts)
    assert "shift" not in note


def test_a_published_network_loses_nothing(tmp_path):
    state = random_state(image_size=32, patch_size=2, channels=3, dim=512, depth=12, heads=8)
    import_official(saved(state, tmp_path / "s.pth"), tmp_path / "s.safetensors", None, ImportOptions())
    assert export_file(tmp_path / "s.safetensors", tmp_path / "back.pth") == ""
