"""Recipes of the configurations are the published ones."""

import pytest
import torch
import yaml
from conftest import ROOT

from uvit_decay.nn import MAE, SiT, UViT
from uvit_decay.tasks import MAETask
from uvit_decay.tasks.base import Optimization


@pytest.mark.parametrize(
    ("stem", "wanted"),
    [
        ("cifar10_uvit_s", (500_000, 128, 2e-4, [0.99, 0.999], 2500, 44_255_328)),
        ("cifar100_uvit_s", (500_000, 128, 2e-4, [0.99, 0.999], 2500, 44_255_328)),
        ("cifar100_uvit_s_cond", (500_000, 128, 2e-4, [0.99, 0.999], 2500, 44_307_552)),
        ("imagenet100_uvit_m", (300_000, 1024, 2e-4, [0.99, 0.99], 5000, 130_122_404)),
        ("imagenet100_uvit_m_cond", (300_000, 1024, 2e-4, [0.99, 0.99], 5000, 130_200_740)),
    ],
)
def test_recipes_are_the_official_ones(stem, wanted):
    config = yaml.safe_load((ROOT / "configs" / f"{stem}.yaml").read_text())
    model = config["model"]["init_args"]
    with torch.device("meta"):
        net = UViT(**model["net"]["init_args"])
    optim = model["optim"]
    assert (
        config["trainer"]["max_steps"],
        config["data"]["init_args"]["batch_size"],
        optim["lr"],
        optim["betas"],
        optim["warmup_steps"],
        sum(parameter.numel() for parameter in net.parameters()),
    ) == wanted
    assert optim["weight_decay"] == 0.03
    assert config["trainer"]["callbacks"][0]["init_args"] == {"decay": 0.9999, "ramp": False}


@pytest.mark.parametrize("stem", ["imagenet1k_mae_b", "imagenet100_mae_b"])
def test_mae_recipes_are_those_of_the_paper(stem):
    """Appendix A.1: 800 epochs, 40 of warm-up, batch 1024, learning rate 6e-4; ViT-B/16 with 6 SkipLayers."""
    config = yaml.safe_load((ROOT / "configs" / f"{stem}.yaml").read_text())
    task = instantiated(config["model"])
    batch = config["data"]["init_args"]["batch_size"]
    assert (config["trainer"]["max_epochs"], batch, task.mask_ratio) == (800, 1024, 0.75)
    assert task.optim.rate(batch) == pytest.approx(6e-4)
    assert (task.optim.betas, task.optim.weight_decay, task.optim.decay_on) == ((0.9, 0.95), 0.05, "matrices")
    assert (task.optim.warmup_epochs, task.optim.schedule, task.optim.min_lr) == (40, "cosine", 0.0)
    assert sum(parameter.numel() for parameter in task.net.parameters()) == 117_291_008
    assert task.net.config["alpha_min"] == 0.6
    assert config["data"]["init_args"]["augment"] == {"crop_scale": [0.2, 1.0]}


def test_protocols_of_the_classifiers_are_those_of_mae():
    """MAE's code: LARS at 6.4 for 16384 images over 90 epochs; AdamW at 2e-3 for 1024 over 100, layer decay 0.65."""
    linear, finetune = (
        yaml.safe_load((ROOT / "configs" / f"imagenet1k_mae_b_{name}.yaml").read_text())
        for name in ("linear", "finetune")
    )
    optims = [Optimization(**config["model"]["init_args"]["optim"]) for config in (linear, finetune)]
    data = [config["data"]["init_args"] for config in (linear, finetune)]
    assert [config["trainer"]["max_epochs"] for config in (linear, finetune)] == [90, 100]
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


def instantiated(model):
    """The task of a configuration, its network on the meta device."""
    arguments, optim = model["init_args"], model["init_args"]["optim"]
    with torch.device("meta"):
        net = MAE(**arguments["net"]["init_args"])
    return MAETask(net, arguments["mask_ratio"], Optimization(**{**optim, "betas": tuple(optim["betas"])}))


@pytest.mark.parametrize(
    ("stem", "count", "parameters"),
    [
        ("imagenet1k_sit_xl", 1000, 693_706_768),
        ("imagenet100_sit_xl", 100, 692_669_968),
        ("imagenet100_sit_b", 100, 133_352_464),
    ],
)
def test_sit_recipes_are_the_official_ones(stem, count, parameters):
    config = yaml.safe_load((ROOT / "configs" / f"{stem}.yaml").read_text())
    model = config["model"]["init_args"]
    with torch.device("meta"):
        net = SiT(**model["net"]["init_args"])
    assert (net.num_classes, sum(parameter.numel() for parameter in net.parameters())) == (count, parameters)
    assert model["optim"] == {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.0, "warmup_steps": 0}
    assert config["data"]["init_args"]["batch_size"] == 256
    assert config["trainer"]["callbacks"][0]["init_args"] == {"decay": 0.9999, "ramp": False}
