"""Prints the contents of the run folder and the sampling command when training ends."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.periodic import run_folder

CONTENTS = {
    "checkpoints/last.ckpt": "the checkpoint (raw and EMA weights)",
    "config.yaml": "the whole configuration",
    "metrics.csv": "all logged numbers, also as TensorBoard events",
    "samples.png": "samples",
    "generation.json": "FID, Inception Score and how they were measured",
    "probes.png": "linear probes, layer x noise level",
    "probes.json": "the best cell, and how everything was measured",
    "probes.csv": "the same as numbers, with effective ranks",
}


class Summary(Callback):
    """A message at the end of training: speed, contents of the run folder and the command to sample from it."""

    def on_fit_end(self, trainer: Trainer, task: LightningModule) -> None:
        folder = run_folder(trainer)
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        speed = trainer.callback_metrics.get("train/images_per_second")
        lines = [f"\n{trainer.global_step} steps" + (f", {float(speed):.1f} images/s" if speed is not None else "")]
        lines += [f"run folder: {folder}"]
        lines += [f"  {name:22} {what}" for name, what in CONTENTS.items() if (folder / name).exists()]
        checkpoint = Path(folder) / "checkpoints" / "last.ckpt"
        if checkpoint.exists():
            lines += [f"sample from it: python sample.py --ckpt {checkpoint}"]
        rank_zero_info("\n".join(lines))
