"""Losses, skip scales and attention over depth that do not fit: one line and exit code 2, before any training."""

from __future__ import annotations

import pytest
from conftest import ROOT, train
from refusals import find_line, refused
from small_teacher import save_teacher

TINY = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=LastCheckpoint", "--trainer.max_steps=1"]
DENOISER = ROOT / "checkpoints" / "digits.safetensors"


def loss(name, **options):
    """Return flags of an auxiliary loss."""
    return [f"--model.auxiliary+={name}", *(f"--model.auxiliary.{key}={value}" for key, value in options.items())]


REFUSED = {
    "a student that is not there": (loss("LayerSync", student="nowhere"), ("nowhere", "in_blocks.0")),
    "a reference that is not there": (loss("LayerSync", reference=9), (9, "in_blocks.0")),
    "a student after its reference": (
        loss("LayerSync", student=2, reference=1),
        ("--model.auxiliary.student", "layer 2", "--model.auxiliary.reference"),
    ),
    "a layer of the dispersive loss": (loss("DispersiveLoss", layer=9), (9, "in_blocks.0")),
    "a batch of one": ([*loss("DispersiveLoss"), "--data.batch_size=1"], ("DispersiveLoss", "--data.batch_size")),
    "a micro-batch of one": (
        [*loss("DispersiveLoss"), "--data.device_batch_size=1"],
        ("DispersiveLoss", "--data.device_batch_size"),
    ),
    "a teacher that is not there": (loss("REPA", teacher="mae.ckpt"), "mae.ckpt"),
    "a teacher that is a denoiser": (loss("REPA", teacher=DENOISER), (f"--model.auxiliary.teacher {DENOISER}", "MAE")),
    "a teacher of timm without its file": (loss("REPA", teacher="timm:vit_tiny_patch16_224=w.pth"), "w.pth"),
    "a layer of REPA": (loss("REPA", layer=9, teacher="teacher.ckpt"), (9, "in_blocks.0")),
    "a kappa of 0": (["--model.net.skip_scale=kappa:0"], ("skip_scale", "kappa:0")),
    "a kappa above 1": (["--model.net.skip_scale=kappa:1.01"], ("skip_scale", "kappa:1.01")),
    "rates over gains that are not there": (
        ["--model.net.schedule=attnres", "--model.net.alpha_min=1", "--model.optim.rate_over_gain=true"],
        ("rate_over_gain", "UViT"),
    ),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return a small MAE of the digits, as a checkpoint."""
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line_before_training(case, teacher, tmp_path, monkeypatch, capsys):
    flags, fragments = REFUSED[case]
    if "teacher.ckpt" in str(flags):
        (tmp_path / "teacher.ckpt").symlink_to(teacher)
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *TINY, *flags)
    find_line(line, *([fragments] if isinstance(fragments, str) else fragments))
    assert not [*tmp_path.rglob("last.ckpt")]
