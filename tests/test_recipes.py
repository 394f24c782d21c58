"""Recipes of the configurations are the published ones."""

import pytest
import torch
import yaml
from conftest import ROOT

from uvit_decay.nn import MAE, SiT, UViT
from uvit_decay.tasks.base import Optimization

CIFAR = {"lr": 2e-4, "betas": [0.99, 0.999], "warmup_steps": 2500, "weight_decay": 0.03}
LATENT = {"lr": 2e-4, "betas": [0.99, 0.99], "warmup_steps": 5000, "weight_decay": 0.03}
SIT = {"lr": 1e-4, "betas": [0.9, 0.999], "warmup_steps": 0, "weight_decay": 0.0}


def config(stem):
    return yaml.safe_load((ROOT / "configs" / f"{stem}.yaml").read_text())


def parameters(kind, spec):
    """Return the number of parameters of a network."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind(**spec["init_args"]).parameters())


@pytest.mark.parametrize(
    ("stem", "kind", "max_steps", "batch", "optim", "count", "classes"),
    [
        ("cifar10_uvit_s", UViT, 500_000, 128, CIFAR, 44_255_328, 0),
        ("cifar100_uvit_s", UViT, 500_000, 128, CIFAR, 44_255_328, 0),
        ("cifar100_uvit_s_cond", UViT, 500_000, 128, CIFAR, 44_307_552, 100),
        ("imagenet100_uvit_m", UViT, 300_000, 1024, LATENT, 130_122_404, 0),
        ("imagenet100_uvit_m_cond", UViT, 300_000, 1024, LATENT, 130_200_740, 100),
        ("imagenet1k_sit_xl", SiT, 400_000, 256, SIT, 693_706_768, 1000),
        ("imagenet100_sit_xl", SiT, 400_000, 256, SIT, 692_669_968, 100),
        ("imagenet100_sit_b", SiT, 400_000, 256, SIT, 133_352_464, 100),
    ],
)
def test_recipes_of_diffusion_are_the_official_ones(stem, kind, max_steps, batch, optim, count, classes):
    found = config(stem)
    model = found["model"]["init_args"]
    assert parameters(kind, model["net"]) == count
    assert model["net"]["init_args"].get("num_classes", 0) == classes
    assert model["optim"] == optim
    assert found["data"]["init_args"]["batch_size"] == batch
    assert found["trainer"]["callbacks"][0]["init_args"] == {"decay": 0.9999, "ramp": False}
    assert found["trainer"]["max_steps"] == max_steps


@pytest.mark.parametrize("stem", ["imagenet1k_mae_b", "imagenet100_mae_b"])
def test_mae_recipes_are_those_of_the_paper(stem):
    """Appendix A.1: 800 epochs, 40 of warm-up, batch 1024, learning rate 6e-4; ViT-B/16 with 6 SkipLayers."""
    found = config(stem)
    model, data = found["model"]["init_args"], found["data"]["init_args"]
    optim = Optimization(**model["optim"])
    assert (found["trainer"]["max_epochs"], data["batch_size"], model["mask_ratio"]) == (800, 1024, 0.75)
    assert optim.rate(1024) == pytest.approx(6e-4)
    assert (list(optim.betas), optim.weight_decay, optim.decay_on) == ([0.9, 0.95], 0.05, "matrices")
    assert (optim.warmup_epochs, optim.schedule, optim.min_lr) == (40, "cosine", 0.0)
    assert parameters(MAE, model["net"]) == 117_291_008
    assert model["net"]["init_args"]["alpha_min"] == 0.6
    assert data["augment"] == {"crop_scale": [0.2, 1.0]}


def test_protocols_of_the_classifiers_are_those_of_mae():
    """MAE's code: LARS at 6.4 for 16384 images over 90 epochs; AdamW at 2e-3 for 1024 over 100, layer decay 0.65."""
    linear, finetune = (config(f"imagenet1k_mae_b_{name}") for name in ("linear", "finetune"))
    optims = [Optimization(**found["model"]["init_args"]["optim"]) for found in (linear, finetune)]
    data = [found["data"]["init_args"] for found in (linear, finetune)]
    assert [found["trainer"]["max_epochs"] for found in (linear, finetune)] == [90, 100]
    assert [optim.rate(one["batch_size"]) for optim, one in zip(optims, data, strict=True)] == [
        pytest.approx(6.4),
        pytest.approx(2e-3),
    ]
    assert [optim.warmup_epochs for optim in optims] == [10, 5]
    assert [optim.weight_decay for optim in optims] == [0.0, 0.05]
    assert [optim.optimizer for optim in optims] == ["lars", "adamw"]
    assert (optims[1].layer_decay, optims[1].decay_on, optims[1].min_lr) == (0.65, "layers", 1e-6)
    task = finetune["model"]["init_args"]
    assert [task[name] for name in ("drop_path", "mixup", "cutmix", "label_smoothing")] == [0.1, 0.8, 1.0, 0.1]
    assert linear["model"]["init_args"]["frozen"]
    assert data[0]["augment"] == {"crop_scale": [0.08, 1.0], "crop_clip": True}
    assert data[1]["augment"] == {"crop_scale": [0.08, 1.0], "rand_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25}
