"""timm's vision transformers: the states are timm's own, and files that do not hold one are one line."""

import json

import pytest
import timm
import torch
from evaluations import evaluate, refused
from refusals import find_line, raises_user_error
from safetensors.torch import save_file
from timm_weights import NAME, weights

from uvit_decay.encoders.timm_models import timm_vit
from uvit_decay.nn.intermediates import pooled


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Write the weights of a model with a head."""
    path = tmp_path_factory.mktemp("timm") / "vit.pth"
    torch.save({"model": weights().state_dict(), "epoch": 3}, path)
    return path


@pytest.mark.parametrize("name", [NAME, "test_vit3"])  # a class token; a register alone
def test_states_are_timms_own(name, tmp_path):
    model = weights(name)
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    net = timm_vit(name, tmp_path / "vit.safetensors")
    x = torch.rand(2, net.channels, net.image_size, net.image_size, generator=torch.Generator().manual_seed(1))
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        states = list(net.forward_intermediates(2 * x - 1))
        options = {"output_fmt": "NLC", "return_prefix_tokens": True, "intermediates_only": True}
        expected = model.forward_intermediates((x - mean) / std, **options)
        final = model.forward_features((x - mean) / std)
    assert net.class_token == model.has_class_token
    assert len(states) == len(net.layers) == len(model.blocks) + 1
    torch.testing.assert_close(net.norm(states[-1]), final)
    for i, (patches, prefix) in enumerate(expected):
        torch.testing.assert_close(states[i + 1], torch.cat([prefix, patches], dim=1))
        means = {"mean": patches, "cls": prefix[:, :1], "all": torch.cat([prefix, patches], dim=1)}
        for pool, tokens in means.items():
            torch.testing.assert_close(pooled(states[i + 1], pool, net.num_prefix_tokens), tokens.mean(dim=1))


def test_an_official_mae_loads_without_its_decoder(tmp_path):
    state = weights(num_classes=0).state_dict()
    extra = {"mask_token": torch.zeros(1, 1, 32), "decoder_blocks.0.norm1.weight": torch.ones(32)}
    torch.save({"model": state | extra}, tmp_path / "mae.pth")
    loaded = timm_vit(NAME, tmp_path / "mae.pth").model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


@pytest.mark.parametrize("name", ["vit_nothing", "vit_tiny_patch16_224.nothing", "vit_tiny_patch16_224", "resnet18"])
def test_a_name_without_such_a_model_or_its_weights_is_one_line(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # in place of minutes of attempts
    with raises_user_error(f"timm {name}"):
        timm_vit(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, ("norm.weight", "uvit-decay import")),
        ({"norm.bias": torch.zeros(64, dtype=torch.int64)}, ("norm.bias", "torch.int64")),
        ({"register_tokens": torch.zeros(1, 4, 64)}, ("register", 4, 0)),
    ],
)
def test_weights_that_do_not_fit_are_not_cast(tmp_path, change, message):
    state = weights(num_classes=0).state_dict() | change
    torch.save({name: value for name, value in state.items() if value is not None}, tmp_path / "cast.pth")
    with raises_user_error("cast.pth", "test_vit", message):
        timm_vit(NAME, tmp_path / "cast.pth")


def test_a_timm_model_is_probed(file, image_dir, tmp_path, monkeypatch, capsys):
    options = ["--data", image_dir, "--test", image_dir, "--layers", "3,6", "--neighbours", 3, "--pool", "cls"]
    evaluate(monkeypatch, tmp_path, "probe", "--ckpt", f"timm:{NAME}={file}", *options)
    name = f"{NAME}-vit-{image_dir.name}-{image_dir.name}-pool-cls-neighbours-3-layers-3+6"
    (folder,) = (tmp_path / "probes").glob(f"{name}_*")
    protocol = json.loads((folder / "probes.json").read_text())["protocol"]
    assert (protocol["model"], protocol["weights"], protocol["pool"]) == (f"timm {NAME}", str(file), "cls")
    assert (protocol["times"], protocol["pictures"]) == ([0.0], "shorter side 183, bicubic, centre 160")
    assert protocol["test images"].startswith(f"{image_dir}; ")  # and that they are the training images
    rows = [line.split(",")[:4] for line in (folder / "probes.csv").read_text().splitlines()[1:]]
    assert rows == [["3", "blocks.2", "encoder", "0.0"], ["6", "blocks.5", "encoder", "0.0"]]
    assert "best grid point: blocks." in capsys.readouterr().out


def test_options_that_a_timm_model_does_not_have_are_refused(file, image_dir, tmp_path, monkeypatch, capsys):
    ckpt = ["--ckpt", f"timm:{NAME}={file}"]
    data = ["--data", image_dir, "--test", image_dir]
    find_line(refused(monkeypatch, tmp_path, capsys, "classify", *ckpt, *data, "--weights", "ema"), "--weights")
    find_line(refused(monkeypatch, tmp_path, capsys, "probe", *ckpt), "--data")
