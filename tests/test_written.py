"""Files of released versions load, sample the same images and resume; docs/checkpoints.md promises it.

`written/0.2.0.tar.xz` was written by `written/write.py` with commit 72e8659.
"""

import tarfile
from importlib import import_module

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, leaves, sample, train
from hub_folders import own_modules, seed_generator, stack_pictures  # noqa: F401
from write import output

from uvit_decay.checkpoint import load, read_training_checkpoint
from uvit_decay.compare.runs import FinishedRun
from uvit_decay.evaluation.statistics_file import StatisticsFile
from uvit_decay.files.instantiate import current_path
from uvit_decay.latents import manifest
from uvit_decay.latents.shards import LatentSet
from uvit_decay.runs import history
from uvit_decay.runs.settings import compare_settings

VERSIONS = sorted((ROOT / "tests" / "written").glob("*.tar.xz"))
NETWORKS = ("uvit", "sit", "mae")
TAKEN_SIZES = {"uvit": (), "sit": ("image_size", "channels", "num_classes"), "mae": ("image_size", "channels")}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # of outputs on another machine
RESUMED = {"rtol": 1e-3, "atol": 1e-3}  # after two optimizer steps there


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda path: path.name)
def files(request, tmp_path_factory):
    """Return the folder with the files of a version."""
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(request.param) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python before 3.11.4
        archive.extractall(folder)
    return folder


@pytest.fixture
def expected(files):
    return np.load(files / "expected.npz")


@pytest.mark.parametrize("weights", ["raw", "ema"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_checkpoints_yield_the_same_numbers(files, expected, name, weights):
    checkpoint = load(files / name / "last.ckpt", weights)
    assert (checkpoint.card.step, checkpoint.card.weights) == (4, weights)
    np.testing.assert_allclose(
        output(name, files / name / "last.ckpt", weights), expected[f"{name}_{weights}"], **TOLERANCE
    )


def test_sample_makes_the_same_images(files, expected, tmp_path, monkeypatch):
    for number, path in enumerate(("uvit/last.ckpt", "uvit.safetensors", "diffusers")):
        sample(monkeypatch, tmp_path, "--ckpt", files / path, "--num", 20, "--out", f"{number}.npz")
        found = np.load(tmp_path / f"{number}.npz")["arr_0"]
        assert np.abs(found.astype(int) - expected["samples"]).max() <= 1, path


def test_diffusers_makes_the_same_images(files, expected):
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(files / "diffusers", trust_remote_code=True)
    pictures = stack_pictures(pipeline(class_labels=[i % 10 for i in range(20)], generator=seed_generator(0)).images)
    assert np.abs(pictures.astype(int) - expected["samples"]).max() <= 1


@pytest.mark.parametrize("name", NETWORKS)
def test_runs_resume_with_their_saved_configuration(files, expected, name, tmp_path, monkeypatch):
    """As the version that wrote them would have continued, also if sizes are given as null."""
    paths = ["--config", files / name / "config.yaml", "--ckpt_path", files / name / "last.ckpt"]
    data = ["--data.path", files / "latents"] if name == "sit" else []
    nulls = [f"--model.net.{size}=null" for size in TAKEN_SIZES[name]]
    train(monkeypatch, tmp_path, "fit", *paths, *data, *nulls, "--trainer.max_steps", 6)
    (resumed,) = tmp_path.rglob("last.ckpt")
    assert load(resumed).card.step == 6
    before, after = (read_training_checkpoint(path)["settings"] for path in (files / name / "last.ckpt", resumed))
    changed = {change.name for change in compare_settings(before, after)} - {"data.path"}
    gone = {"trainer.callbacks.GenerationMetrics.extractor.steps"}  # an argument that 0.2.0's release has no more
    assert changed - gone == {"trainer.max_steps"}
    np.testing.assert_allclose(output(name, resumed, "raw"), expected[f"{name}_resumed"], **RESUMED)


def test_latents_hold_the_same_numbers(files):
    latents = LatentSet(files / "latents", manifest.read(files / "latents"))
    x, labels = latents[[0, 4, 5]]
    assert (x.shape, x.dtype) == ((3, 8, 2, 2), torch.float16)
    assert labels.tolist() == [0, 1, 1]
    assert float(x.double().sum()) == pytest.approx(-2.9334830045700073, rel=1e-12)


def test_statistics_are_read(files):
    found = StatisticsFile(files / "statistics.npz")
    mean, cov = found.statistics("features")
    assert (mean.shape, cov.shape) == ((64,), (64, 64))
    assert found.metadata["extractor"].startswith("small-cnn-")


def test_histories_are_read(files):
    run = files / "uvit"
    for name, value in (("probes.jsonl", "best_accuracy"), ("generation.jsonl", "fd"), ("branches.jsonl", "x_0")):
        measurements = history.read(run / name)
        assert measurements[-1].step == 4
        assert all(value in measurement.values for measurement in measurements)
    values = history.read(run / "probes.jsonl")[-1].values
    assert values["tracked_effective_rank_exp"] > 1
    assert values["tracked_spectrum_entropy"] >= 0
    found = FinishedRun.read(run)
    assert (found.last_step, found.options["model.net.dim"]) == (4, 8)


def test_every_class_that_they_name_is_where_it_was(files):
    configs = [yaml.safe_load(path.read_text()) for path in files.rglob("config.yaml")]
    cards = [read_training_checkpoint(path)["uvit_decay"] for path in files.rglob("*.ckpt")]
    named = {value for place, value in leaves([*configs, *cards]) if place[-1] == "class_path"}
    assert len(named) > 15
    for class_path in named:
        module, _, name = current_path(class_path).rpartition(".")
        assert hasattr(import_module(module), name), class_path
