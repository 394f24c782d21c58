"""Nothing is lost: whole checkpoints, and Ctrl-C between two steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

CHECK_EVERY = 10  # steps between the agreements of several processes to stop


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and then renames: a reader, or a crash, sees the old checkpoint or the new one.

    Lightning's own goes through the system's temporary folder, and a move between file systems is not atomic.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)


class Safeguard(Callback):
    """Makes checkpoints atomic; at Ctrl-C finishes the step, saves the last checkpoint, and stops.

    A second Ctrl-C stops at once, without saving.
    """

    def __init__(self) -> None:
        self._asked = False
        self._previous: Any = None

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def on_fit_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._asked = False
        self._previous = signal.signal(signal.SIGINT, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, self._previous)

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *_: Any) -> None:
        if trainer.world_size == 1:
            stop = self._asked
        elif trainer.global_step % CHECK_EVERY:
            return
        else:
            stop = trainer.strategy.reduce_boolean_decision(self._asked, all=False)
        if stop:
            self._save(trainer)
            raise KeyboardInterrupt

    def _save(self, trainer: Trainer) -> None:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if folder is not None:
            path = Path(folder) / "last.ckpt"
            trainer.save_checkpoint(path)
            rank_zero_info(f"\nstopped at step {trainer.global_step}; go on with: --ckpt_path {path}")

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def on_fit_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, task: LightningModule, exception: BaseException) -> None:
        self._restore()
