"""Every configuration trains, made tiny; and a baseline is one flag away."""

import re
from contextlib import suppress

import pytest
import torch
import yaml
from cifar_files import write_cifar
from conftest import ROOT, train

from uvit_decay.commands.train import parser as checks
from uvit_decay.data import CIFAR100
from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = ["--model.net.dim=16", "--model.net.depth=2", "--model.net.heads=2", "--data.batch_size=4"]
LATENT = [*SMALL, "--model.net.image_size=null", "--data.classes=null", "--data.num_workers=0"]
TOKENS = ["--model.net.image_size=16", "--data.image_size=16", "--model.net.patch_size=4", "--data.num_workers=0"]
MAE_SMALL = [*SMALL, *TOKENS, "--model.net.decoder_dim=8", "--model.net.decoder_depth=2", "--model.net.decoder_heads=2"]
RESNET_SMALL = ["--model.net.width=8", *(flag for flag in TOKENS if "patch_size" not in flag), "--data.batch_size=4"]
CLASSIFIER = [*SMALL, *TOKENS, "--model.net.num_classes=null", "--data.test_path=null", "--data.holdout=0.4"]
TINY = {
    "digits": ["--model.net.dim=16", "--model.net.depth=2"],
    "cifar10_uvit_s": SMALL,
    "cifar100_uvit_s": SMALL,
    "cifar100_uvit_s_cond": SMALL,
    "imagenet100_uvit_m": LATENT,
    "imagenet100_uvit_m_cond": [*LATENT, "--model.net.num_classes=2"],
    "digits_sit": ["--model.net.dim=16", "--model.net.depth=2"],
    "imagenet100_sit_b": [*LATENT, "--model.net.num_classes=2"],
    "imagenet100_sit_xl": [*LATENT, "--model.net.num_classes=2"],
    "imagenet1k_sit_xl": [*LATENT, "--model.net.num_classes=2"],
    "cifar10_sit": [*SMALL, "--model.net.num_classes=2"],
    "pictures": SMALL,
    "mae_cifar10": [*MAE_SMALL, "--data.holdout=0.4"],
    "imagenet1k_mae_b": MAE_SMALL,
    "imagenet100_mae_b": [*MAE_SMALL, "--data.classes=null"],
    "resnet18": [*RESNET_SMALL, "--model.net.num_classes=2", "--data.holdout=0.4"],
    "resnet_cifar10": [*RESNET_SMALL, "--model.net.num_classes=2", "--data.holdout=0.4"],
    "imagenet1k_mae_b_linear": CLASSIFIER,
    "imagenet1k_mae_b_finetune": CLASSIFIER,
}
PLAIN = {"resnet_cifar10"}  # judges samples of all networks


@pytest.fixture(scope="module")
def data_paths(encoded, image_dir, tmp_path_factory):
    """Yield small data, by the name of the data module that reads them."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        write_cifar(CIFAR100, folder, patch)
        yield {"Images": image_dir, "AugmentedImages": image_dir, "CIFAR100": folder, "Latents": encoded}


def small(config, data_paths):
    """Return the flags with which a configuration is tiny, on small data and on a CPU."""
    flags = ["--config", str(config), "--trainer.accelerator=cpu", "--trainer.devices=1", *TINY[config.stem]]
    kind = yaml.safe_load(config.read_text())["data"]["class_path"].rpartition(".")[2]
    if kind in data_paths:
        flags.append(f"--data.path={data_paths[kind]}")
    return flags


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_trains(config, data_paths, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path, "fit", *small(config, data_paths), "--trainer.fast_dev_run=2")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_doctor_examines_a_configuration(config, data_paths, tmp_path, monkeypatch, capsys):
    """It ends with its report; small data may be too few for the metrics of a configuration, which is a finding."""
    for name, value in {"WARM": 1, "STEPS": 1, "SECONDS": 0.0}.items():
        monkeypatch.setattr(f"uvit_decay.doctor.rehearsal.{name}", value)
    with suppress(SystemExit):
        train(monkeypatch, tmp_path, "doctor", *small(config, data_paths))
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ errors?, \d+ warnings?", lines[-1]), lines
    assert any("memory: a step of" in line for line in lines), lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_baseline_starts_from_the_same_weights(config):
    """The decay is all that the runs with and without it differ in."""
    spec = yaml.safe_load(config.read_text())["model"]["init_args"]["net"]
    kind = {kind.__name__: kind for kind in (MAE, ResNet, SiT, UViT, ViT)}[spec["class_path"].rpartition(".")[2]]
    as_the_data = {"image_size": 32, "channels": 3, "num_classes": 10}
    arguments = {name: as_the_data[name] if value is None else value for name, value in spec["init_args"].items()}
    states = []
    for changed in ({}, {"alpha_min": 1.0}):
        torch.manual_seed(0)
        small = {"width": 8} if kind is ResNet else {"dim": 16, "depth": 2, "heads": 2}
        states.append(kind(**arguments | small | changed).state_dict())
    different = [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]
    assert different == ([] if config.stem in PLAIN else ["alphas"])
    if kind is UViT:
        assert "--model.net.zero_init false" in config.read_text()  # the official start, the third run


def test_settings_are_written_as_pyyaml_writes_them():
    """libyaml could break lines at other places, or escape other letters."""
    settings = {"words": "a sentence of many words " * 9, "letters": "é 漢字 😀 \x07 tab\t", "lines": "a\nb\n"}
    settings |= {"numbers": [1e-5, 1.0, float("inf"), 3], "nested": [{"a": []}, None], "date": "2001-01-01", "no": "no"}
    expected = yaml.safe_dump(settings, default_flow_style=False, allow_unicode=True, sort_keys=False)
    assert checks._dump(settings) == expected
