"""Auxiliary losses, skip scales and attention over depth, by flags: trained, resumed, sampled, probed, compared.

A loss with a network of its own, a skip scale, and attention over depth of both kinds; --exhaustive tries all variants.
"""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch
import yaml
from conftest import digits_config, pixels, same, sample, train
from evaluations import evaluate
from hub_folders import own_modules  # noqa: F401
from small_programs import skip_unless_tried
from small_teacher import save_teacher

from uvit_decay.__main__ import main
from uvit_decay.decay import SHORTCUTS
from uvit_decay.runs import history

TINY = ["--config=small.yaml", "--model.net.dim=16", "--model.net.depth=2", "--data.batch_size=16"]
TINY += ["--trainer.log_every_n_steps=1", "--model.net.zero_init=false"]
KEPT = {"EMA": {}, "LastCheckpoint": {}, "LinearProbes": {"times": [0.1], "max_train": 60, "max_test": 40}}
VARIANTS = {
    "layersync": ["--model.auxiliary+=LayerSync"],
    "dispersive16": ["--model.auxiliary+=DispersiveLoss"],
    "repa": ["--model.auxiliary+=REPA", "--model.auxiliary.hidden=8", "--model.auxiliary.teacher=mae.ckpt"],
    "stream": ["--model.net.skip_scale=stream", "--model.net.schedule=gain", "--model.net.alpha_min=0.7"],
}
VARIANTS["stream"] += ["--model.net.output_skip=learned"]
CONNECTIONS = [name for name, kind in SHORTCUTS.items() if not kind.numbers]
VARIANTS |= {name: [f"--model.net.schedule={name}", "--model.net.alpha_min=1"] for name in CONNECTIONS}
LOSSES = ("layersync", "dispersive16", "repa")
SOME = ("layersync", "dispersive16", "repa", "stream", "attnres")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return a small MAE of the digits, as a checkpoint."""
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, teacher, tmp_path_factory, exhaustive):
    """Return the name of a variant, and a folder of two four-step runs: version_0 whole, version_1 resumed at 2."""
    skip_unless_tried(request.param, exhaustive, SOME)
    folder = tmp_path_factory.mktemp(request.param)
    content = digits_config(**KEPT)
    callbacks = content["trainer"]["callbacks"]
    content["trainer"]["callbacks"] = [each for each in callbacks if each["class_path"].rpartition(".")[2] in KEPT]
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    (folder / "mae.ckpt").write_bytes(teacher.read_bytes())
    words = ["fit", *TINY, *VARIANTS[request.param]]
    with pytest.MonkeyPatch.context() as patch:
        train(patch, folder, *words, "--trainer.max_steps=4")
        train(patch, folder, *words, "--trainer.max_steps=2")
        train(patch, folder, *words, "--trainer.max_steps=4", "--ckpt_path=last")
    return request.param, folder


def run_folder(folder, version):
    return folder / "runs" / "digits" / f"version_{version}"


def checkpoint(folder, version=0):
    return run_folder(folder, version) / "checkpoints" / "last.ckpt"


def test_a_resumed_run_is_the_run_that_was_not_stopped(variant):
    name, folder = variant
    whole, parts = (torch.load(checkpoint(folder, version), weights_only=True) for version in (0, 1))
    assert whole["global_step"] == parts["global_step"] == 4
    assert same(whole["state_dict"], parts["state_dict"])
    assert same(whole["callbacks"]["EMA"]["shadow"], parts["callbacks"]["EMA"]["shadow"])
    probed, again = (history.read(run_folder(folder, version) / "probes.jsonl")[-1] for version in (0, 1))
    assert probed.step == again.step == 4
    assert probed.values == again.values
    if name in LOSSES:
        rows = list(csv.DictReader((run_folder(folder, 0) / "metrics.csv").open()))
        logged = [float(row[f"train/aux/{name}"]) for row in rows if row["train/loss"]]
        assert len(logged) == 4
        assert all(map(math.isfinite, logged))


def test_its_checkpoint_and_exports_make_the_same_images(variant, monkeypatch):
    _, folder = variant
    monkeypatch.chdir(folder)
    ours = checkpoint(folder)
    exports = {"a.safetensors": [], "a": ["--to", "diffusers"]}
    for target, options in exports.items():
        main_with(monkeypatch, "export", str(ours), target, *options)
    images = []
    for i, source in enumerate([ours, *exports]):
        sample(monkeypatch, folder, "--ckpt", source, "--num", 4, "--steps", 2, "--out", f"{i}.npz")
        images.append(pixels(folder / f"{i}.npz"))
    assert images[0].shape == (4, 8, 8, 1)
    assert np.array_equal(images[0], images[1])
    assert np.array_equal(images[0], images[2])


def main_with(monkeypatch, *words):
    """`uvit-decay ...` in this process."""
    monkeypatch.setattr("sys.argv", ["uvit-decay", *words])
    main()


def test_it_is_probed_and_compared(variant, monkeypatch, capsys):
    name, folder = variant
    options = ["--times", "0.1", "--max-train", "60", "--max-test", "40", "--out", "probes"]
    evaluate(monkeypatch, folder, "probe", "--ckpt", checkpoint(folder), *options)
    report = json.loads((folder / "probes" / "probes.json").read_text())
    assert 0 <= report["best"]["test_accuracy"] <= 1
    capsys.readouterr()
    by = "model.net.schedule"
    evaluate(monkeypatch, folder, "compare", run_folder(folder, 0), run_folder(folder, 1), "--by", by)
    shown = capsys.readouterr().out
    expected = name if name in CONNECTIONS else "gain" if name == "stream" else "linear"
    assert shown.splitlines()[2].startswith(f"| {expected} | 2 |")
