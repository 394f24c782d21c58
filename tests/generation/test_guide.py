"""Autoguidance as a user asks for it: --guide and --guide-step of sample.py and of evaluate.py generation."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import pixels, same, sample, tiny_net, tiny_task, tiny_trainer
from hub_folders import write_denoiser
from refusals import find_line, refused

from uvit_decay.callbacks import EMA, LastCheckpoint
from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.diffusion.noise_path import VP, Linear
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.evaluation.image_sources import GeneratedImages
from uvit_decay.generation.options import SamplingOptions
from uvit_decay.generation.samples import Samples

DIGITS = tuple("0123456789")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return the folder checkpoints of a run of 12 steps that kept step 6."""
    folder = tmp_path_factory.mktemp("run")
    callbacks = EMA(0.9), LastCheckpoint(every_n_steps=10_000, keep_every_n_steps=6)
    tiny_trainer(folder, *callbacks, max_steps=12).fit(tiny_task(lr=1e-2), Digits(32))
    return folder / "checkpoints"


def test_a_guide_changes_the_images_except_at_scale_1(checkpoints, tmp_path, monkeypatch, capsys):
    base = ["--ckpt", checkpoints / "last.ckpt", "-n", 3, "--steps", 2]
    step = ["--guide-step", 6, "--guidance"]
    file = ["--guide", checkpoints / "step_00000006.ckpt", "--guidance"]
    for out, flags in {
        "alone": ["--guidance", 1],
        "one": [*step, 1],
        "step": [*step, 4],
        "file": [*file, 4],
        "late": [*step, 4, "--guidance-interval", "0.9,1"],
    }.items():
        sample(monkeypatch, tmp_path, *base, *flags, "--out", f"{out}.npz")
        printed = capsys.readouterr()
        assert ("step 6 of" in printed.out) is (out != "alone")
    alone, one, by_step, by_file, late = (
        pixels(tmp_path / f"{out}.npz") for out in ("alone", "one", "step", "file", "late")
    )
    assert np.array_equal(alone, one)
    assert np.array_equal(by_step, by_file)
    assert not np.array_equal(by_step, alone)
    assert not np.array_equal(late, by_step)


def test_a_folder_of_images_says_which_guide_it_has(checkpoints, tmp_path, monkeypatch, capsys):
    guide = tmp_path / "guide.ckpt"
    guide.write_bytes((checkpoints / "step_00000006.ckpt").read_bytes())
    base = ["--ckpt", checkpoints / "last.ckpt", "-n", 2, "--steps", 1, "--guidance", 2, "--out", "p"]
    sample(monkeypatch, tmp_path, *base, "--guide", guide)
    about = json.loads((tmp_path / "p" / "sampling.json").read_text())
    expected = {"guide": str(guide), "guide_step": 6, "guide_weights": "ema", "guidance": 2.0}
    assert expected.items() <= about.items()
    sample(monkeypatch, tmp_path, *base, "--guide-step", 6)  # the same contents elsewhere
    for other in ([], ["--guide-step", 12]):
        find_line(refused(capsys, sample, monkeypatch, tmp_path, *base, *other), "--out p", "guide_")


def test_names_say_the_guide_and_both_networks_are_counted(checkpoints):
    options = SamplingOptions(steps=3, guidance=1.5, guide_step=6, device="cpu")
    samples = Samples.from_options(checkpoints / "last.ckpt", options)
    assert samples.name == "ema_dpm++3_w1.5_guide-step_00000006-step6_seed0"
    samples.images(range(2))
    assert samples.nfe == 2 * 3 * 2
    source = GeneratedImages(samples, 2, 1)
    assert source.name == "last-step12_ema_dpm++3_w1.5_guide-step_00000006-step6_seed0_nfe3"
    assert source.metadata()["guide_step"] == 6
    within = replace(samples, sampling=replace(samples.sampling, guidance_interval=(0.9, 1.0)))
    within.images([0])
    assert within.nfe == 3 + 1


def test_a_guide_has_the_weights_that_are_asked_for(checkpoints):
    for asked, weights in ((None, "ema"), ("ema", "ema"), ("raw", "raw")):
        options = SamplingOptions(guidance=1.5, guide_step=6, device="cpu", weights=asked)
        net = Samples.from_options(checkpoints / "last.ckpt", options).model.guide.net
        assert same(net.state_dict(), load(checkpoints / "step_00000006.ckpt", weights).net.state_dict())
    states = [load(checkpoints / "step_00000006.ckpt", weights).net.state_dict() for weights in ("ema", "raw")]
    assert not same(*states)


def test_the_card_of_an_interval_is_for_the_null_label(tmp_path):
    path = tmp_path / "interval.safetensors"
    sampling = Sampling("dpm++", 4, 2.0, guidance_channels=1, guidance_interval=(0.2, 0.6))
    write_denoiser(path, tiny_net(), VP(), "eps", sampling, DIGITS)
    samples = Samples.from_options(path, SamplingOptions(guidance=3.0, guide=path, device="cpu"))
    assert samples.sampling == replace(sampling, guidance=3.0, guidance_channels=None, guidance_interval=None,
                                       precision="float32")  # fmt: skip


def test_compilation_is_of_both_networks(checkpoints, monkeypatch):
    compiled = []
    monkeypatch.setattr("torch.compile", lambda net, **options: compiled.append(net) or net)
    options = SamplingOptions(steps=1, guidance=2.0, guide_step=6, device="cpu")
    samples = replace(Samples.from_options(checkpoints / "last.ckpt", options), compiled=True)
    assert {*compiled} == {samples.model.net, samples.model.guide.net}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--guide-step", 6], ("--guide-step", "--guidance")),
        (["--guide-step", 6, "--guide", "vp.safetensors", "--guidance", 2], ("--guide", "--guide-step")),
        (["--guide-step", 7, "--guidance", 2], ("--guide-step 7", "step_00000006.ckpt", "step_00000012.ckpt")),
        (["--guide", "missing.ckpt", "--guidance", 2], "--guide missing.ckpt"),
        (["--guide-step", 6, "--guidance", 2, "--guidance-channels", 1], ("--guidance-channels", "a guide")),
        (["--guide", "larger.safetensors", "--guidance", 2], ("--guide", "shape", 16)),
        (["--guide", "linear.safetensors", "--guidance", 2], ("--guide", "path", "Linear")),
        (["--guide", "renamed.safetensors", "--guidance", 2], ("renamed.safetensors", "classes")),
        (["--guide", "ENCODER", "--guidance", 2], "MAE"),
    ],
)
def test_a_guide_that_does_not_fit_is_one_line(checkpoints, encoder, tmp_path, monkeypatch, capsys, flags, message):
    files = {
        "vp": (tiny_net(), VP(), DIGITS),
        "larger": (tiny_net(image_size=16), VP(), DIGITS),
        "linear": (tiny_net(), Linear(), DIGITS),
        "renamed": (tiny_net(), VP(), ("nought", *DIGITS[1:])),
    }
    for name, (net, path, names) in files.items():
        write_denoiser(tmp_path / f"{name}.safetensors", net, path, "eps", Sampling("dpm++", 4), names)
    flags = [encoder if flag == "ENCODER" else flag for flag in flags]
    line = refused(capsys, sample, monkeypatch, tmp_path, "--ckpt", checkpoints / "last.ckpt", "--out", "a.npz", *flags)
    find_line(line, message)
    assert not (tmp_path / "a.npz").exists()
