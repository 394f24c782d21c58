"""A step must not wait for a GPU: parts of one; tests/test_meta_device.py has the steps of all tasks."""

from collections import Counter

import torch
from conftest import tiny_task
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from record_ops import Waits

from uvit_decay.data import Digits
from uvit_decay.data.batches import InMemory


def test_the_progress_bar_shows_the_loss_and_fetches_it_at_log_steps_only(tmp_path, monkeypatch, capsys):
    options = {"enable_checkpointing": False, "enable_model_summary": False, "limit_val_batches": 0, "logger": False}
    options |= {"callbacks": TQDMProgressBar()}  # Lightning takes another one where rich is installed
    trainer = Trainer(accelerator="cpu", max_steps=12, log_every_n_steps=5, default_root_dir=tmp_path, **options)
    fetched, item = Counter(), torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: fetched.update([trainer.global_step]) or item(tensor))
    trainer.fit(tiny_task(), Digits(32))
    assert fetched.keys() <= {0, 5, 10}  # 0 is before the first step ends
    last = "".join(capsys.readouterr()).rpartition("Epoch 0")[2]
    assert "train/loss=" in last
    assert "train/images_per_second=" in last


def test_images_on_the_device_are_chosen_and_mirrored_without_waiting_for_it():
    dataset = InMemory(torch.empty(9, 3, 4, 4, dtype=torch.uint8, device="meta"), torch.arange(9))
    with Waits() as waits:
        images, labels = dataset.mirrored([3, 1, 4], torch.tensor([True, False, True]))
    assert waits.found == []
    assert (images.device.type, images.shape, labels.tolist()) == ("meta", (3, 3, 4, 4), [3, 1, 4])
