"""A folder for diffusers in place of a checkpoint: --ckpt, export, --model.init_from."""

import json

import pytest
import torch
from hub_folders import BUNDLED, own_modules, sampled, write_denoiser  # noqa: F401
from safetensors.torch import load_file, save_file

from uvit_decay.autoencoder import Autoencoder
from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.io import WEIGHTS
from uvit_decay.commands.convert import main
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.hub.folder import export_folder
from uvit_decay.nn import SiT
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.init_from import read_weights


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    export_folder(BUNDLED, folder)
    return folder


def test_a_folder_is_the_checkpoint_that_it_came_from(digits, tmp_path):
    ours, theirs = load(digits), load(BUNDLED)
    assert ours.card == theirs.card
    assert ours.path == theirs.path
    assert all(torch.equal(value, ours.net.state_dict()[name]) for name, value in theirs.net.state_dict().items())
    assert (sampled(digits, range(4)) == sampled(BUNDLED, range(4))).all()
    assert read_weights(digits).card == theirs.card
    main(["export", str(digits), str(tmp_path / "again.safetensors")])
    assert load(tmp_path / "again.safetensors").card == theirs.card


def test_its_own_autoencoder_decodes_latents(vae, tmp_path):
    space = Autoencoder(str(vae)).space
    net = SiT(4, 2, 4, dim=16, depth=2, heads=2, num_classes=2, alpha_min=0.8)
    file = write_denoiser(
        tmp_path / "sit.safetensors", net, Linear(), "velocity", Sampling("euler", 2), ("a", "b"), space
    )
    export_folder(file, tmp_path / "folder")
    assert (sampled(tmp_path / "folder", range(2)) == sampled(file, range(2))).all()
    assert load(tmp_path / "folder").card.latents.vae == str(tmp_path / "folder" / "vae")
    assert str(vae).encode() not in (tmp_path / "folder" / WEIGHTS).read_bytes()  # no path of this machine


def test_what_is_none_is_refused(digits, tmp_path):
    with pytest.raises(UserError, match="holds ema weights, not raw"):
        load(digits, "raw")
    (tmp_path / "denoiser").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({}))
    save_file(load_file(digits / WEIGHTS), tmp_path / WEIGHTS)
    with pytest.raises(UserError, match="was not exported by this project"):
        load(tmp_path)
    content = bytearray((digits / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        load(tmp_path)
