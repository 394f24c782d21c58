"""The scripts as a user runs them: train, look, sample, encode."""

import re
import shlex

import numpy as np
import pytest
from conftest import ROOT, sample, save_tiny_vae
from PIL import Image

SMALL = ["--model.net.dim=16", "--model.net.depth=2", "--model.sampling.steps=3"]
SMALL += ["--trainer.val_check_interval=10", "--trainer.log_every_n_steps=5"]


@pytest.mark.slow
def test_the_default_trains_looks_and_names_the_command_that_samples(programs, tmp_path):
    quick = ["tests/shared/surroundings.py", "quick"]
    trained = programs.start(*quick, "train.py", "fit", "--trainer.max_steps=20", *SMALL, cwd=tmp_path)
    assert trained.wait() == 0, trained.stderr
    run = tmp_path / "runs" / "digits" / "version_0"
    files = {path.name for path in run.iterdir() if path.stat().st_size}
    events = {name for name in files if name.startswith("events.out.tfevents.")}
    wanted = {"config.yaml", "launches.jsonl", "metrics.csv", "samples.png", "probes.png", "probes.csv", "probes.jsonl"}
    assert files - events == wanted | {"generation.jsonl", "checkpoints", "samples"}
    assert events
    header = (run / "metrics.csv").read_text().splitlines()[0]
    for column in ("train/loss", "train/lr", "train/grad_norm", "train/images_per_second", "val/loss", "fd"):
        assert column in header
    command = re.search(r"python (sample\.py .*)", trained.stdout + trained.stderr)[1]
    sampled = programs.start(*shlex.split(command), "--num", "10", cwd=tmp_path)
    assert sampled.wait() == 0, sampled.stderr
    assert Image.open(tmp_path / "samples.png").size[0] > 600


@pytest.mark.slow
def test_images_become_latents_a_network_and_images_again(programs, image_dir, tmp_path, monkeypatch, capsys):
    vae = save_tiny_vae(tmp_path / "vae")
    encode = ["-m", "uvit_decay", "encode", str(image_dir), "latents", "--vae", "vae"]
    encode += ["--image-size", "64"]
    encoded = programs.start(*encode, cwd=tmp_path)
    assert encoded.wait() == 0, encoded.stderr
    assert "latents: 22 images, 2 classes" in encoded.stdout
    config = str(ROOT / "configs" / "imagenet100_uvit_m_cond.yaml")
    small = ["--model.net.image_size=8", "--model.net.dim=16", "--model.net.depth=2", "--model.net.heads=2"]
    small += ["--model.net.num_classes=2", "--data.path=latents", "--data.classes=null", "--data.batch_size=8"]
    trained = programs.start("train.py", "fit", "--config", config, *small, "--trainer.max_steps=3", cwd=tmp_path)
    assert trained.wait() == 0, trained.stderr
    checkpoint = str(tmp_path / "runs" / "imagenet100_uvit_m_cond" / "version_0" / "checkpoints" / "last.ckpt")
    for out, options in (("own.npz", []), ("other.npz", ["--vae", str(save_tiny_vae(tmp_path / "other", seed=1))])):
        flags = ["--ckpt", checkpoint, "--num", "3", "--steps", "3", "--out", out]
        sample(monkeypatch, tmp_path, *flags, *options)
    own, other = (np.load(tmp_path / name)["arr_0"] for name in ("own.npz", "other.npz"))
    assert own.shape == other.shape == (3, 64, 64, 3)
    assert not np.array_equal(own, other)
    vae.rename(tmp_path / "moved")
    with pytest.raises(SystemExit) as stop:
        sample(monkeypatch, tmp_path, "--ckpt", checkpoint)
    assert stop.value.code == 2
    assert "--vae" in capsys.readouterr().err.splitlines()[-1]
