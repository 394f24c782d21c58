"""Every configuration runs, made tiny; and a baseline is one flag away."""

import pytest
import torch
import yaml
from cifar_files import write_cifar
from conftest import ROOT, train
from PIL import Image

from uvit_decay.data import CIFAR100
from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = ["--model.net.dim=16", "--model.net.depth=2", "--model.net.heads=2", "--data.batch_size=4"]
LATENT = [*SMALL, "--model.net.image_size=4", "--data.classes=null", "--data.num_workers=0"]
TOKENS = ["--model.net.image_size=16", "--data.image_size=16", "--model.net.patch_size=4", "--data.num_workers=0"]
MAE_SMALL = [*SMALL, *TOKENS, "--model.net.decoder_dim=8", "--model.net.decoder_depth=2", "--model.net.decoder_heads=2"]
RESNET_SMALL = ["--model.net.width=4", *(flag for flag in TOKENS if "patch_size" not in flag), "--data.batch_size=4"]
CLASSIFIER = [*SMALL, *TOKENS, "--model.net.num_classes=2", "--data.test_path=null", "--data.holdout=0.4"]
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
    "mae_cifar10": [*MAE_SMALL, "--data.holdout=0.4"],
    "imagenet1k_mae_b": MAE_SMALL,
    "imagenet100_mae_b": [*MAE_SMALL, "--data.classes=null"],
    "resnet18": [*RESNET_SMALL, "--model.net.num_classes=2", "--data.holdout=0.4"],
    "imagenet1k_mae_b_linear": CLASSIFIER,
    "imagenet1k_mae_b_finetune": CLASSIFIER,
}


def image_folder(folder):
    """Two classes of five small RGB images."""
    random = torch.Generator().manual_seed(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for i in range(5):
            pixels = torch.randint(256, (40, 36, 3), generator=random, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / label / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def data_paths(encoded, tmp_path_factory):
    """Small data, by the name of the data module that reads them."""
    folder = tmp_path_factory.mktemp("data")
    images = image_folder(folder / "images")
    with pytest.MonkeyPatch.context() as patch:
        write_cifar(CIFAR100, folder, patch)
        yield {"Images": images, "AugmentedImages": images, "CIFAR100": folder, "Latents": encoded}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_trains(config, data_paths, tmp_path, monkeypatch):
    overrides = list(TINY[config.stem])
    kind = yaml.safe_load(config.read_text())["data"]["class_path"].rpartition(".")[2]
    if kind in data_paths:
        overrides.append(f"--data.path={data_paths[kind]}")
    flags = ["--trainer.fast_dev_run=2", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    train(monkeypatch, tmp_path, "fit", "--config", str(config), *flags, *overrides)


@pytest.mark.parametrize("stem", ["cifar100_uvit_s", "imagenet100_uvit_m"])
def test_a_conditional_configuration_differs_in_what_makes_it_so(stem):
    plain, conditional = (
        dict(leaves(yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()))) for name in (stem, f"{stem}_cond")
    )
    different = {name for name in plain | conditional if plain.get(name) != conditional.get(name)}
    conditions = {"num_classes", "label_dropout", "guidance", "experiment", "alpha_min"}
    assert {"num_classes", "label_dropout"} <= {name.rpartition(".")[2] for name in different} <= conditions


def leaves(tree, name=""):
    """Dotted names and values of a nested configuration."""
    if not isinstance(tree, dict | list):
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(value, f"{name}.{key}")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_says_what_it_is_for(config):
    header = config.read_text().split("seed_everything")[0]
    for word in ("Claim:", "Command:", "Baseline:", "Cost"):
        assert word in header


def test_one_flag_makes_the_baseline(tmp_path, monkeypatch, capsys):
    flags = ["--model.net.alpha_min", "1.0", "--print_config"]
    with pytest.raises(SystemExit) as stop:
        train(monkeypatch, tmp_path, "fit", *flags)
    assert stop.value.code in (0, None)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["net"]["init_args"]["alpha_min"] == 1.0
    for config in CONFIGS:
        assert yaml.safe_load(config.read_text())["model"]["init_args"]["net"]["init_args"]["alpha_min"] < 1.0


def test_without_a_config_the_digits_are_the_default_and_another_config_takes_nothing_from_them(
    tmp_path, monkeypatch, capsys
):
    for args, experiment, init in (
        ((), "digits", "xavier"),
        (["--config", str(ROOT / "configs/cifar10_uvit_s.yaml")], "cifar10_uvit_s", "official"),
    ):
        with pytest.raises(SystemExit):
            train(monkeypatch, tmp_path, "fit", *args, "--print_config")
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["trainer"]["logger"]["init_args"]["experiment"] == experiment
        assert printed["model"]["init_args"]["net"]["init_args"]["init"] == init


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fit", "--model.net.alpha_min", "0"], "alpha_min must lie in (0, 1], got 0"),
        (["fit", "--model.net.depth", "5"], "depth must be even"),
        (["fit", "--model.net.patch_size", "3"], "image_size 8 is not divisible by patch_size 3"),
        (["fit", "--model.net.num_classes", "7"], "--model.net.num_classes 10"),
        (["fit", "--model.alpha", "0.7"], "'alpha' is not accepted"),
        (["fit", "--trainer.maximum", "3"], "unrecognized arguments: --trainer.maximum 3"),
        (["fit", "--model.net.alpha_mn", "1"], "Option 'alpha_mn' is not accepted; did you mean alpha_min?"),
        (["fti"], "fti is no subcommand of train.py, which are fit, validate, doctor; did you mean fit?"),
        (["fit", "--trainer.max_steps", "ten"], "\"trainer.max_steps\": Expected a <class 'int'>. Got value: ten"),
        (["fit", "--config", "missing.yaml"], "File does not exist"),
        (["fit", "--config", "odd.yaml"], "trainr"),
        (["fit", "--config", "broken.yaml"], "cannot read broken.yaml"),
        (["fit", "--data.batch_size", "2000"], "larger than the 1437 images"),
        (["fit", "--data.seed", "3"], "--seed_everything"),
        (["fit", "--ckpt_path", "missing.ckpt"], "the file missing.ckpt does not exist"),
        (["fit", "--ckpt_path", "text.ckpt"], "text.ckpt is no file of tensors but a text file"),
        (["fit", "--model.sampling.sampler", "magic"], "unknown sampler 'magic'"),
        (["fit", "--trainer.logger.save_dir", "text.ckpt/x"], "cannot write"),
        (["fit", "--config", str(ROOT / "configs/cifar10_uvit_s.yaml"), "--data.path", "empty"], "no images"),
        (["fit", "--config", str(ROOT / "configs/cifar10_uvit_s.yaml"), "--data.path", "no.zip"], "no such folder"),
        (["fit", "--config", str(ROOT / "configs/cifar10_uvit_s.yaml"), "--data.path", "bad.zip"], "not a zip"),
        (["fit", "--config", str(ROOT / "configs/cifar10_uvit_s.yaml"), "--data.path", "broken"], "1 of 11 images"),
        (["fit", "--trainer.accelerator", "abacus"], "abacus"),
        (["fit", "--ckpt_path", "last"], "there is no checkpoint of a run in runs/digits"),
        (["validate"], "validate needs --ckpt_path"),
        (["fit", "--trainer.precision", "bf16-true"], "train in 32-true or bf16-mixed"),
        (["fit", "--trainer.strategy", "fsdp_cpu_offload"], "fsdp is the one that shards here"),
        (["fit", "--config", str(ROOT / "configs/digits_sit.yaml"), "--model.sampling.sampler", "uvit-em"], "infinite"),
        (["fit", "--model.weighting", "velocity", "--model.prediction", "velocity"], "weighting"),
        (["fit", "--model.optim.betas", "[2, 3]"], "the first of betas must lie in [0, 1), got 2"),
        (["fit", "--model.label_dropout", "0"], "needs label_dropout above 0"),
        ([], "subcommand"),
    ],
    ids=lambda value: " ".join(value[-2:]).rpartition("/")[2] if isinstance(value, list) else "",
)
def test_a_wrong_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, args, message):
    (tmp_path / "odd.yaml").write_text("trainr: {max_steps: 3}\n")
    (tmp_path / "broken.yaml").write_text("trainer: [unclosed\n")
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    (tmp_path / "bad.zip").write_text("not a zip")
    (tmp_path / "empty").mkdir()
    image_folder(tmp_path / "broken")
    (tmp_path / "broken" / "cat" / "x.png").write_text("not an image")
    with pytest.raises(SystemExit) as stop:
        train(monkeypatch, tmp_path, *args)
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_validate_reports_the_loss_of_a_checkpoint(trained, tmp_path, monkeypatch, capsys):
    flags = ["--ckpt_path", str(trained), "--model.net.dim=16", "--model.net.depth=2"]
    train(monkeypatch, tmp_path, "validate", *flags)
    assert "val/loss" in capsys.readouterr().out


def test_a_checkpoint_of_another_width_is_refused(trained, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        train(monkeypatch, tmp_path, "fit", "--ckpt_path", str(trained), "--model.net.dim=32", "--model.net.depth=2")
    assert stop.value.code == 2
    assert "was trained with net.dim 16, this run has 32" in capsys.readouterr().err


def test_a_version_that_is_there_already_is_refused(tmp_path):
    from uvit_decay.callbacks import RunLogger
    from uvit_decay.runtime.errors import UserError

    logger = RunLogger("digits", str(tmp_path), version=0)
    logger.log_metrics({"a": 1.0}, 0)
    logger.finalize("success")
    with pytest.raises(UserError, match="exists already"):
        RunLogger("digits", str(tmp_path), version=0)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_baseline_starts_from_the_same_weights(config):
    """The decay is all that the runs with and without it differ in."""
    spec = yaml.safe_load(config.read_text())["model"]["init_args"]["net"]
    kind = {kind.__name__: kind for kind in (MAE, ResNet, SiT, UViT, ViT)}[spec["class_path"].rpartition(".")[2]]
    states = []
    for changed in ({}, {"alpha_min": 1.0}):
        torch.manual_seed(0)
        small = {"width": 4} if kind is ResNet else {"dim": 16, "depth": 2, "heads": 2}
        states.append(kind(**spec["init_args"] | small | changed).state_dict())
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == ["alphas"]
    if kind is UViT:
        assert "--model.net.zero_init false" in config.read_text()  # the official start, the third run
