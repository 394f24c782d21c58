"""Callbacks of a real pre-training: probes of the encoder, reconstructions of masked images, curves of both."""

import numpy as np
import pytest
import torch
from conftest import tiny_task, tiny_trainer
from evaluations import evaluate, refused
from PIL import Image
from refusals import find_line, raises_user_error
from runs import fit
from small_mae import mae_task

from uvit_decay import checkpoint
from uvit_decay.callbacks import LinearProbes, Reconstructions
from uvit_decay.data import Digits
from uvit_decay.representations.probe_options import Probing
from uvit_decay.representations.probing import Prober
from uvit_decay.runs import history
from uvit_decay.runtime.distributed import Processes

SMALL = {"max_train": 200, "max_test": 100}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return the run folder of a small MAE of digits, probed at steps 10 and 20."""
    folder = tmp_path_factory.mktemp("mae")
    probes = LinearProbes(every_n_steps=10, layers=(0, "blocks.1"), pool="cls", **SMALL)
    fit(folder, probes, Reconstructions(every_n_steps=10, num=6), max_steps=20, task=mae_task())
    return folder


def test_an_encoder_is_probed_while_it_trains_as_afterwards(pretrained):
    first, last = history.read(pretrained / "probes.jsonl")
    assert (first.step, last.step) == (10, 20)
    tracked = {"tracked_knn", "tracked_spectrum_entropy_of_cls", "tracked_effective_rank_exp_of_cls"}
    assert {"best_accuracy", *tracked} <= last.values.keys()
    assert (last.metadata["tracked"], last.metadata["pool"]) == ("blocks.1", "cls")
    assert (last.metadata["times"], last.metadata["input"]) == ([0.0], "clean images")
    rows = [line.split(",")[:4] for line in (pretrained / "probes.csv").read_text().splitlines()[1:]]
    assert rows == [["0", "embeddings", "embeddings", "0.0"], ["2", "blocks.1", "encoder", "0.0"]]

    data, found = Digits(), checkpoint.load(pretrained / "checkpoints" / "last.ckpt")
    data.setup()
    grid = Prober(found.net, found.path, data, Probing(layers=("2",), pool="cls", **SMALL), CPU).grid(Processes())
    for name, value in grid.average_layer(2).items():
        assert value == pytest.approx(last.values[f"tracked_{name}"], rel=1e-6), name


def test_reconstructions_show_the_same_images_and_masks_at_every_step(pretrained):
    steps = [np.asarray(Image.open(pretrained / "reconstructions" / f"step_{n:08d}.png")) for n in (10, 20)]
    assert np.array_equal(steps[1], np.asarray(Image.open(pretrained / "reconstructions.png")))
    (first, second), cell = steps, 96 + 4
    assert first.shape == (22 + 6 * cell + 4, 3 * cell + 4, 3)
    assert np.array_equal(first[:, : 2 * cell], second[:, : 2 * cell])
    assert not np.array_equal(first, second)
    grey = (first[26:122, cell + 4 : 2 * cell] == 128).all(axis=2)[::24, ::24]
    assert grey.sum() == 12  # of 16 patches


def test_a_checkpoint_reconstructs_what_the_callback_did(pretrained, tmp_path, monkeypatch, capsys):
    options = ["--ckpt", pretrained / "checkpoints" / "last.ckpt", "--images", "digits:test"]
    evaluate(monkeypatch, tmp_path, "reconstruct", *options, "--num", 6)
    find_line(capsys.readouterr().out, "reconstructions.png", "6 of digits-test", "75%")
    ours, theirs = (np.asarray(Image.open(path / "reconstructions.png")) for path in (tmp_path, pretrained))
    assert np.abs(ours.astype(int) - theirs).max() <= 1
    line = refused(monkeypatch, tmp_path, capsys, "reconstruct", *options, "--mask-ratio", 0.99)
    find_line(line, "--mask-ratio", 0.99)


@pytest.mark.parametrize(
    ("callback", "task", "message"),
    [
        (LinearProbes(times=(0.1,)), mae_task, ("encoder", "times")),
        (LinearProbes(layers=(0,), watch=2), mae_task, "watch 2"),
        (LinearProbes(pool="cls"), tiny_task, ("UViT", "class token")),
        (Reconstructions(mask_ratio=0.99), mae_task, ("mask_ratio", 0.99)),
    ],
)
def test_callbacks_of_another_task_are_one_line_before_training(callback, task, message, tmp_path):
    with raises_user_error(message):
        tiny_trainer(tmp_path, callback, max_steps=1).fit(task(), Digits(32))


def test_layers_of_a_denoiser_may_be_chosen(tmp_path):
    fit(tmp_path, LinearProbes(times=(0.1,), layers=(0, 1), **SMALL), max_steps=5)
    (line,) = history.read(tmp_path / "probes.jsonl")
    assert (line.metadata["tracked"], line.metadata["layers"]) == ("in_blocks.0", ["0", "1"])
