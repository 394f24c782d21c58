"""Configurations, class paths and settings of version 0.1.0 (commit 5cb78b9) mean what they meant.

`run/` is a run of its digits_sit.yaml: config.yaml is of that commit; last.ckpt of a later one, which stored settings,
too, when no module had moved yet.
"""

import importlib.util

import pytest
import torch
import yaml
from conftest import ROOT, leaves, refused, train
from test_configs import TINY, data_paths  # noqa: F401  a fixture

from uvit_decay.checkpoint import load
from uvit_decay.commands.checks import _current
from uvit_decay.evaluation.open_by_name import open_data, open_images
from uvit_decay.runtime.instantiate import MOVED, renamed
from uvit_decay.tasks.settings import differences

BEFORE = ROOT / "tests" / "written_before"
CONFIGS = sorted((BEFORE / "configs").glob("*.yaml"))
RUN = BEFORE / "run"
CLASSES = {  # those that a configuration or a checkpoint could name, by package and by module
    "callbacks": "CPUThreads EMA GenerationMetrics LastCheckpoint LinearProbes Preview RunLogger Summary",
    "callbacks.checkpoint": "LastCheckpoint",
    "callbacks.ema": "EMA",
    "callbacks.generation": "GenerationMetrics",
    "callbacks.logger": "RunLogger",
    "callbacks.preview": "Preview",
    "callbacks.probe": "LinearProbes",
    "callbacks.summary": "Summary",
    "callbacks.threads": "CPUThreads",
    "data": "CIFAR10 CIFAR100 Digits ImageData Images Latents",
    "data.base": "ImageData",
    "data.cifar": "CIFAR10 CIFAR100",
    "data.digits": "Digits",
    "data.images": "Images",
    "data.latents": "Latents",
    "data.latents.module": "Latents",
    "diffusion.generate": "Sampling",
    "diffusion.path": "GVP Linear SDDiscrete VP",
    "diffusion.sde": "SDE",
    "metrics": "Inception SmallClassifier",
    "metrics.features": "Inception SmallClassifier",
    "nn": "SiT UViT",
    "nn.sit": "SiT",
    "nn.uvit": "UViT",
    "tasks": "DiffusionTask Task",
    "tasks.base": "Optimization Task",
    "tasks.diffusion": "DiffusionTask",
}
CLASS_PATHS = {f"uvit_decay.{module}.{name}" for module, names in CLASSES.items() for name in names.split()}


def resolved(class_path):
    module, _, name = renamed(class_path).rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("class_path", sorted(CLASS_PATHS))
def test_a_class_is_found_under_its_name_of_before(class_path):
    assert resolved(class_path).__name__ == class_path.rpartition(".")[2]


@pytest.mark.parametrize("config", [*CONFIGS, RUN / "config.yaml"], ids=lambda path: path.stem)
def test_every_class_of_a_configuration_is_found(config):
    named = [value for place, value in leaves(yaml.safe_load(config.read_text())) if place[-1] == "class_path"]
    assert len(named) > 8
    assert set(named) <= CLASS_PATHS


def test_the_table_is_followed_in_one_step_and_names_nothing_that_is_there():
    for before, now in MOVED.items():
        assert renamed(f"{now}.X") == f"{now}.X"
        assert importlib.util.find_spec(before) is None


def test_options_that_are_gone_are_left_out_where_they_said_nothing():
    last, best = {"keep_last": 2, "keep_weights_only": False}, {"metric": "fid", "weights_only": False}
    other = {"weights_only": False}
    assert _current([last, best, other]) == [{"keep_last": 2}, {"metric": "fid"}, other]
    assert _current({"keep_weights_only": True}) == {"keep_weights_only": True}  # which the parser refuses


def test_a_class_that_was_dropped_ends_in_one_line(tmp_path, monkeypatch, capsys):
    extractor = {"class_path": "uvit_decay.metrics.CustomExtractor", "init_args": {"path": "net.pt"}}
    callback = {"class_path": "uvit_decay.callbacks.GenerationMetrics", "init_args": {"extractor": extractor}}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", "--config", str(tmp_path / "old.yaml"))
    assert line.startswith("error: uvit_decay.metrics.CustomExtractor is no longer part of uvit_decay: ")
    assert line.endswith("an Extractor of ten lines does it: docs/extending.md")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_trains(config, data_paths, tmp_path, monkeypatch):  # noqa: F811
    kind = yaml.safe_load(config.read_text())["data"]["class_path"].rpartition(".")[2]
    path = [f"--data.path={data_paths[kind]}"] if kind in data_paths else []
    flags = ["--trainer.fast_dev_run=1", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    train(monkeypatch, tmp_path, "fit", "--config", str(config), *flags, *TINY[config.stem], *path)


def test_a_run_resumes_with_its_config_and_no_setting_differs(tmp_path, monkeypatch, caplog):
    """The config is the one that the run saved, with all defaults."""
    flags = ["--config", str(RUN / "config.yaml"), "--ckpt_path", str(RUN / "last.ckpt")]
    train(monkeypatch, tmp_path, "fit", *flags, "--trainer.max_steps=3")
    (line,) = [text for text in caplog.messages if "other settings" in text]
    assert line == "other settings than the checkpoint's: trainer.max_steps 3 (was 2)"
    assert load(tmp_path / "runs" / "digits_sit" / "version_0" / "checkpoints" / "last.ckpt").card.step == 3


def test_a_class_that_has_moved_is_no_other_setting():
    contents = torch.load(RUN / "last.ckpt", weights_only=True)
    before = contents["settings"]["model.path.class_path"]
    assert before == "uvit_decay.diffusion.path.Linear" != renamed(before)
    assert differences(contents["settings"], renamed(contents["settings"])) == []


def test_checkpoints_with_class_paths_of_before_load():
    checkpoint = load(RUN / "last.ckpt")
    assert (type(checkpoint.net).__name__, type(checkpoint.path).__name__) == ("SiT", "Linear")
    assert load(ROOT / "checkpoints" / "digits.safetensors").card.step == 2000


@pytest.mark.parametrize("flags", [["--model.path", "{}"], ["--model.path={}"], ["--model.path.class_path={}"]])
def test_flags_may_name_classes_as_before(flags, tmp_path, monkeypatch, capsys):
    flags = [flag.format("uvit_decay.diffusion.path.Linear") for flag in flags]
    with pytest.raises(SystemExit):
        train(monkeypatch, tmp_path, "fit", *flags, "--print_config")
    path = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["path"]
    assert path["class_path"] == "uvit_decay.diffusion.noise_path.Linear"


def test_images_and_data_of_a_configuration_are_read(tmp_path, image_dir):
    """As --reference CONFIG:train and --data CONFIG of evaluate.py."""
    assert len(open_images(f"{BEFORE / 'configs' / 'digits.yaml'}:train", 1)) == 1437
    config = tmp_path / "folder.yaml"
    options = {"path": str(image_dir), "holdout": 0.1, "image_size": 16, "batch_size": 2}
    config.write_text(yaml.safe_dump({"data": {"class_path": "uvit_decay.data.images.Images", "init_args": options}}))
    assert (open_data(str(config), None, 16, 3).image_size, len(open_images(f"{config}:test", 3))) == (16, 2)
