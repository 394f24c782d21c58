"""Masked autoencoders and classifiers on one and on two processes: masks, losses, weights and accuracy."""

from functools import partial

import pytest
import torch
from conftest import state, tiny_trainer
from gloo import on_two_processes
from lightning.pytorch import Callback
from small_mae import mae_task, small_mae
from small_vit import PROBE, fine_tuning, linear_probe

from uvit_decay.callbacks.ema import evaluation_weights
from uvit_decay.data import Digits

TASKS = {
    "pre-training": mae_task,
    # Decoder blocks that read no SkipLayer: no parameter may be without a gradient.
    "long encoder": lambda: mae_task(small_mae(depth=6, decoder_depth=1)),
    "fine-tuning": fine_tuning,
    "probe": lambda: linear_probe(optim=PROBE),
}


class Watch(Callback):
    """Losses of all steps, the noise of every mask, and the statistics of batch norms that a callback finds."""

    def __init__(self) -> None:
        self.losses, self.masks, self.found = [], [], []

    def on_fit_start(self, trainer, task) -> None:
        task.net.register_forward_pre_hook(lambda net, inputs: self.masks.extend(inputs[1:2]))

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        if trainer.global_step == 2:  # before anything is validated or saved
            with evaluation_weights(trainer, task):
                self.found = [value.tolist() for name, value in task.net.named_buffers() if "running" in name]


def train_and_save(make, folder, rank=0, **options):
    """Train for six steps; return losses and accuracies, and save weights and masks."""
    task, watch = make(), Watch()
    options |= {"limit_val_batches": 1.0, "val_check_interval": 3, "check_val_every_n_epoch": None}
    trainer = tiny_trainer(folder, watch, max_steps=6, log_every_n_steps=1, **options)
    trainer.fit(task, Digits(32))
    folder.mkdir(exist_ok=True)
    torch.save((state(task), watch.masks), folder / f"{rank}.pt")
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return {"losses": watch.losses, "found": watch.found, **values}


def rank_of_two(folder, rank):
    return {name: train_and_save(make, folder / name, rank, devices=2, strategy="ddp") for name, make in TASKS.items()}


@pytest.mark.slow
def test_two_processes_train_as_one_does(programs, tmp_path):
    ranks = on_two_processes(programs, partial(rank_of_two, tmp_path), tmp_path)
    assert ranks[0] == ranks[1]
    for name, make in TASKS.items():
        one, two = train_and_save(make, tmp_path / f"one {name}"), ranks[0][name]
        # The batch norm of a probe sees the share of a process.
        near = {"rel": 0.05} if name == "probe" else {"abs": 2e-5}
        assert two.pop("losses") == pytest.approx(one.pop("losses"), **near)
        assert bool(two.pop("found")) == bool(one.pop("found")) == (name == "probe")
        assert one.keys() == two.keys()
        assert two["val/loss"] == pytest.approx(one["val/loss"], abs=2e-3 if name == "probe" else 2e-5)
        (weights, masks), (ours, first), (theirs, second) = (
            torch.load(path) for path in (tmp_path / f"one {name}" / "0.pt", *sorted((tmp_path / name).glob("?.pt")))
        )
        for key, value in weights.items():
            assert torch.equal(ours[key], theirs[key]), key
            if name != "probe" and not key.endswith("qkv.bias"):
                torch.testing.assert_close(ours[key], value, rtol=0, atol=2e-5, msg=key)
        if isinstance(make().net, type(small_mae())):
            for whole, a, b in zip(masks[:3], first, second, strict=False):
                assert torch.equal(whole, torch.cat([a, b]))
        else:
            assert two["val/top1"] == pytest.approx(one["val/top1"], abs=0.0 if name == "fine-tuning" else 0.05)
