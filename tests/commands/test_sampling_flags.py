"""sample.py as a user runs it: image i is the same however it is asked for, and what the flags of sampling change."""

import json

import numpy as np
from conftest import pixels, sample
from refusals import find_line, refused


def test_the_checkpoints_own_sampler_keeps_its_steps_when_it_is_named(trained, tmp_path, monkeypatch):
    for flags, expected in (
        (["dpm++"], ("dpm++", 4)),
        (["dpm++", "--steps", "3"], ("dpm++", 3)),
        (["ddim"], ("ddim", 25)),
    ):
        out = "-".join(flags)
        sample(monkeypatch, tmp_path, "--ckpt", trained, "--num", "1", "--sampler", *flags, "--out", out)
        settings = json.loads((tmp_path / out / "sampling.json").read_text())
        assert (settings["sampler"], settings["steps"]) == expected


CHANGES = {
    "dpm++2_w9": [],
    "dpm++2_w9_noclip": ["--no-clip"],
    "dpm++2_w9_t0.8-1": ["--guidance-interval", "0.8,1"],
    "dpm++2_w9_bf16": ["--precision", "bf16"],
}


def test_clipping_guidance_and_precision_are_chosen(trained, tmp_path, monkeypatch, capsys):
    base = ["--ckpt", trained, "-n", "3", "--steps", "2", "--guidance", "9", "--sampler", "dpm++"]
    for name, flags in CHANGES.items():
        sample(monkeypatch, tmp_path, *base, *flags, "--out", f"{name}.npz")
    plain, *others = (pixels(tmp_path / f"{name}.npz").astype(int) for name in CHANGES)
    assert all(np.any(images != plain) for images in others)
    assert abs(others[-1] - plain).mean() < 20
    line = refused(capsys, sample, monkeypatch, tmp_path, *base, "--precision", "tf32", "--device", "cpu")
    find_line(line, "tf32", "CUDA")


def test_image_i_does_not_depend_on_how_many_are_asked_for_but_on_seed_and_class(trained, tmp_path, monkeypatch):
    base = ["--ckpt", trained, "--classes", "3"]
    for name, args in {
        "few": ["--num", 2],
        "many": ["--num", 5, "--batch-size", 3],
        "seed": ["--num", 2, "--seed", 8],
        "class": ["--num", 2, "--classes", "4"],
        "raw": ["--num", 2, "--weights", "raw"],
    }.items():
        sample(monkeypatch, tmp_path, *base, *args, "--out", f"{name}.npz")
    few = pixels(tmp_path / "few.npz")
    assert np.array_equal(few, pixels(tmp_path / "many.npz")[:2])
    for other in ("seed", "class", "raw"):
        assert not np.array_equal(few, pixels(tmp_path / f"{other}.npz"))
