"""A step must not wait for a GPU: what reads numbers from the device, or copies to it, does so at log steps only."""

from collections import Counter

import torch
from conftest import tiny_task
from lightning.pytorch import Trainer

from uvit_decay.data import Digits


def test_the_progress_bar_shows_the_loss_and_fetches_it_at_log_steps_only(tmp_path, monkeypatch, capsys):
    options = {"enable_checkpointing": False, "enable_model_summary": False, "limit_val_batches": 0, "logger": False}
    trainer = Trainer(accelerator="cpu", max_steps=12, log_every_n_steps=5, default_root_dir=tmp_path, **options)
    fetched, item = Counter(), torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: fetched.update([trainer.global_step]) or item(tensor))
    trainer.fit(tiny_task(), Digits(32))
    assert fetched.keys() <= {0, 5, 10}  # 0 is before the first step ends
    last = "".join(capsys.readouterr()).rpartition("Epoch 0")[2]
    assert "train/loss=" in last
    assert "train/images_per_second=" in last
