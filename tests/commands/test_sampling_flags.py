"""sample.py as a user runs it: image i is the same however it is asked for, and what the flags of sampling change."""

import numpy as np
import pytest
import torch
from conftest import pixels, sample
from hub_folders import write_denoiser
from refusals import find_line, refused

from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.nn import SiT


def test_the_checkpoints_own_sampler_keeps_its_steps_when_it_is_named(trained, tmp_path, monkeypatch, capsys):
    for flags, name in ((["dpm++"], "dpm++4_w2"), (["dpm++", "--steps", "3"], "dpm++3_w2"), (["ddim"], "ddim25_w2")):
        sample(monkeypatch, tmp_path, "--ckpt", trained, "--num", "1", "--sampler", *flags)
        assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "calls"),
    [(["--sampler", "sit-sde"], 250), (["--sampler", "sit-ode", "--steps", "10", "--guidance", "2"], 20)],
)
def test_a_sit_is_evaluated_as_often_as_its_sampler_says(tmp_path, monkeypatch, flags, calls):
    net = SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10, alpha_min=0.8, wiring="decayed")
    checkpoint, sampling = tmp_path / "sit.safetensors", Sampling("dpm++", 4, 2.0)
    write_denoiser(checkpoint, net, Linear(), "velocity", sampling, tuple("0123456789"))
    sizes = []

    def count(module, args, output) -> None:
        if isinstance(module, SiT):
            sizes.append(len(args[0]))

    handle = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        sample(monkeypatch, tmp_path, "--ckpt", checkpoint, "--num", "3", "--guidance", "1", *flags)
    finally:
        handle.remove()
    assert sizes == [6 if "2" in flags else 3] * calls
    assert (tmp_path / "samples.png").exists()


CHANGES = {
    "dpm++2_w9": [],
    "dpm++2_w9_noclip": ["--no-clip"],
    "dpm++2_w9_t0.8-1": ["--guidance-interval", "0.8,1"],
    "dpm++2_w9_bf16": ["--precision", "bf16"],
}


def test_clipping_guidance_and_precision_are_chosen_and_named(trained, tmp_path, monkeypatch, capsys):
    base = ["--ckpt", trained, "-n", "3", "--steps", "2", "--guidance", "9", "--sampler", "dpm++"]
    for name, flags in CHANGES.items():
        sample(monkeypatch, tmp_path, *base, *flags, "--out", f"{name}.npz")
        assert f"{name}, ema" in capsys.readouterr().err
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
