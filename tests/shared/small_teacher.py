"""A checkpoint of a small masked autoencoder, the teacher of auxiliary losses."""

from pathlib import Path

from conftest import tiny_trainer
from small_mae import mae_task

from uvit_decay.data import Digits


def save_teacher(folder: Path) -> Path:
    """Train a small MAE of the digits for one step; return its checkpoint."""
    trainer = tiny_trainer(folder, max_steps=1)
    trainer.fit(mae_task(), Digits(32))
    trainer.save_checkpoint(folder / "mae.ckpt")
    return folder / "mae.ckpt"
