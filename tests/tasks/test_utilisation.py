"""Model FLOPs against counts by hand, utilisation in metrics.csv, and networks that cannot be counted."""

import csv

import pytest
import torch
from conftest import tiny_net, tiny_task, tiny_trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from refusals import find_line
from small_vit import small_vit

from uvit_decay.data import Digits
from uvit_decay.nn import UViT
from uvit_decay.tasks import ClassifyTask, utilisation
from uvit_decay.tasks.utilisation import image_flops, peak_bytes

CPU = torch.device("cpu")
RATE = 1e9


def uvit_flops(dim, depth, tokens, patch=2, channels=1):
    """Return the FLOPs of a step of a class-conditional U-ViT without time MLP, for images of `tokens` tokens."""
    blocks = (depth + 1) * (12 * dim**2 * 2 * tokens + 4 * tokens**2 * dim)  # qkv, proj and MLP; q k^T and weights v
    merges = depth // 2 * 2 * (2 * dim) * dim * tokens
    patches = tokens - 2
    head = 2 * tokens * dim * patch**2 * channels + patches * patch**2 * 2 * 9 * channels**2
    embedding = 2 * patches * patch**2 * channels * dim  # the images need no gradient
    return 3 * (blocks + merges + head) + 2 * embedding


def flops(folder, task, **options):
    """Return the FLOPs of an image, and check that counting changes nothing."""
    found = []

    def count(trainer, task):
        weights, state = [p.clone() for p in task.net.parameters()], torch.get_rng_state()
        found.append(image_flops(task))
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(p, before) for p, before in zip(task.net.parameters(), weights, strict=True))
        assert all(p.grad is None and p.device == CPU for p in task.net.parameters())

    tiny_trainer(folder, LambdaCallback(on_train_start=count), max_steps=1).fit(task, Digits(32, **options))
    return found[0]


def test_flops_of_a_step_are_those_counted_by_hand_and_recomputation_is_none(tmp_path):
    expected = uvit_flops(16, 2, 18)
    assert flops(tmp_path, tiny_task()) == expected
    assert flops(tmp_path, tiny_task(tiny_net(checkpointing=True))) == expected
    assert flops(tmp_path, tiny_task(), device_batch_size=8) == expected  # of an image, whatever the pieces


def test_a_frozen_encoder_costs_its_forward_pass(tmp_path):
    net = small_vit()
    linear = 2 * net.linear_head.weight.numel()
    whole = flops(tmp_path, ClassifyTask(small_vit()))
    frozen = flops(tmp_path, ClassifyTask(small_vit(), frozen=True))
    embedding = 2 * net.patch_embed.proj.weight.numel() * net.patch_embed.tokens  # has no gradient of its input
    assert whole - 3 * linear + embedding == 3 * (frozen - 2 * linear)


def rows(folder, task, monkeypatch, rate=RATE, **options):
    monkeypatch.setattr(utilisation, "get_available_flops", lambda *_: rate)
    logger = CSVLogger(folder)
    tiny_trainer(folder, max_steps=2, logger=logger, log_every_n_steps=1, **options).fit(task, Digits(32))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return list(csv.DictReader(file))


def test_utilisation_and_memory_are_logged_with_the_speed(tmp_path, monkeypatch):
    for row in rows(tmp_path, tiny_task(), monkeypatch):
        expected = float(row["train/images_per_second"]) * uvit_flops(16, 2, 18) / RATE
        assert float(row["train/mfu"]) == pytest.approx(expected, rel=1e-4)
        assert 0.05 < float(row["train/memory_gib"]) <= peak_bytes(CPU) / 2**30


class Uncountable(UViT):
    """A network that reads a value of a tensor, which the meta device has not."""

    def forward(self, x, t, y=None):
        assert float(x.sum()) == float(x.sum())
        return super().forward(x, t, y)


def test_a_network_that_cannot_be_counted_trains_and_one_line_says_so(tmp_path, monkeypatch, caplog):
    net = Uncountable(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10, init="xavier")
    actual = rows(tmp_path, tiny_task(net), monkeypatch)
    assert "train/mfu" not in actual[0]
    assert float(actual[0]["train/memory_gib"]) > 0
    (line,) = [text for text in caplog.messages if "train/mfu" in text]
    find_line(line, "FLOPs", "Uncountable")


def test_a_device_without_a_data_sheet_has_no_utilisation(tmp_path, monkeypatch):
    assert "train/mfu" not in rows(tmp_path, tiny_task(), monkeypatch, rate=None)[0]
