"""The message at the end of a run."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.files.writing import LOCK, quote_path
from uvit_decay.runs.checkpoints import LAST
from uvit_decay.runs.folder import run_folder
from uvit_decay.runs.history import CHECKPOINTS, CONFIG
from uvit_decay.tasks.base import Task
from uvit_decay.terminal.program import localise


class Summary(Callback):
    """A message at the end of training: speed, contents of the run folder and a command that uses its checkpoint."""

    _start = 0  # step at which training started

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._start = trainer.global_step

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        folder = run_folder(trainer)
        if not trainer.is_global_zero or trainer.fast_dev_run or trainer.global_step == self._start:
            return
        message = f"\n{trainer.global_step} steps"
        speed = trainer.callback_metrics.get("train/images_per_second")
        if speed is not None:
            message += f", {float(speed):.1f} images/s"
        contents = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
        message += f"\nrun folder: {folder}, with {', '.join(contents)}"
        checkpoint = folder / CHECKPOINTS / LAST
        if checkpoint.exists():
            flag = f"--ckpt {quote_path(checkpoint)}{task.trust_flags}"
            if task.path is not None:
                message += f"\nsample from it: {localise('python sample.py')} {flag}"
            else:
                command = f"{localise('python evaluate.py')} probe {flag} --data {quote_path(folder / CONFIG)}"
                message += f"\nevaluate its features: {command}"
        rank_zero_info(message)
