"""Checkpoints: self-sufficient, exported without loss, and refused with one clear line where they are not ours."""

import pytest
import torch
from conftest import same, tiny_net
from official_files import changed_training
from safetensors.torch import save_file

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file
from uvit_decay.runtime.errors import UserError


def test_a_checkpoint_gives_back_the_network_its_weights_and_its_sampling(trained):
    contents = torch.load(trained, weights_only=True)
    raw, ema = load(trained, "raw"), load(trained)
    assert (raw.card.weights, ema.card.weights, ema.card.step) == ("raw", "ema", 12)
    assert same(raw.net.state_dict(), {k.removeprefix("net."): v for k, v in contents["state_dict"].items()})
    assert same(dict(ema.net.named_parameters()), contents["callbacks"]["EMA"]["shadow"])
    assert not same(raw.net.state_dict(), ema.net.state_dict())
    assert ema.net.config == tiny_net().config
    assert (ema.card.sampling.steps, ema.card.sampling.guidance) == (4, 2.0)
    assert ema.card.class_names == tuple("0123456789")
    assert not ema.net.training


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_an_exported_checkpoint_is_the_same_network(trained, tmp_path, weights):
    target = tmp_path / "deep" / "model.safetensors"
    export_file(trained, target, weights)
    ours, exported = load(trained, weights), load(target)
    assert same(ours.net.state_dict(), exported.net.state_dict())
    assert (exported.card, exported.path) == (ours.card, ours.path)
    with pytest.raises(UserError, match=f"holds {weights} weights"):
        load(target, "raw" if weights == "ema" else "ema")


def test_bad_files_are_refused_in_one_line(trained, tmp_path):
    short, plain = tmp_path / "short.ckpt", tmp_path / "plain.safetensors"
    short.write_bytes(trained.read_bytes()[: trained.stat().st_size // 2])
    save_file({"weight": torch.zeros(2)}, plain)
    for path, message in (
        (short, "truncated or not a checkpoint"),
        (tmp_path, "is a folder"),
        (plain, "not exported by this project"),
    ):
        with pytest.raises(UserError, match=message):
            load(path)


def test_missing_ema_weights_are_said(trained, tmp_path):
    raw = changed_training(trained, tmp_path, lambda contents: contents["callbacks"].pop("EMA"))
    assert load(raw).card.weights == "raw"
    with pytest.raises(UserError, match="no EMA weights"):
        load(raw, "ema")
