"""Nothing is lost: whole checkpoints at fixed steps, at the end, and when the run is stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.periodic import Periodic, run_folder
from uvit_decay.disk import replacing
from uvit_decay.errors import Terminated, check_whole

AGREE_EVERY = 10  # steps between the agreements of several processes to stop
ONE_SIGNAL = 2.0  # seconds in which it may come twice, since torchrun passes on what a scheduler sends to all processes
STOPS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and then renames: a reader, or a crash, sees the old checkpoint or the new one.

    Lightning's own goes through the system's temporary folder, and a move between file systems is not atomic.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save(checkpoint, file)


class LastCheckpoint(Checkpoint):
    """Keeps checkpoints/last.ckpt in the run folder up to date; at Ctrl-C or SIGTERM finishes the step, saves, stops.

    Several processes finish up to 10 steps. A second signal, 2 seconds later or more, stops at once, without saving.
    Resume with --ckpt_path. It saves before previews, metrics and probes look, so that whatever happens to them costs
    no step.

    Args:
        every_n_steps: optimizer steps between saves; 0 saves only at the end.
        keep_every_n_steps: optimizer steps between checkpoints that are kept as step_N.ckpt; 0 keeps none.
    """

    def __init__(self, every_n_steps: int = 1000, keep_every_n_steps: int = 0) -> None:
        check_whole(0, every_n_steps=every_n_steps, keep_every_n_steps=keep_every_n_steps)
        self.every_n_steps, self.keep_every_n_steps = every_n_steps, keep_every_n_steps
        self._seen_step = self._saved_step = -1
        self._asked: int | None = None  # the signal that came
        self._asked_at = 0.0
        self._ended = False  # and saved

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        trainer.callbacks = sorted(trainer.callbacks, key=self._place)  # Lightning puts checkpoints last

    def _place(self, callback: Callback) -> int:
        if isinstance(callback, Periodic):
            return 2
        return 1 if callback is self else 3 if isinstance(callback, Checkpoint) else 0

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        """Take the signals from Lightning, which has just taken SIGTERM to stop without saving.

        When the run ends, whether it fails or not, Lightning gives all signals back to who had them before.
        """
        self._seen_step = self._saved_step = trainer.global_step
        self._asked, self._ended = None, False
        for signum in STOPS:
            signal.signal(signum, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._ended:
            raise STOPS[signum]
        if self._asked is None:
            self._asked, self._asked_at = signum, now
            name = "Ctrl-C" if signum == signal.SIGINT else "SIGTERM"
            message = f"\n{name}: finishing this step; again after {ONE_SIGNAL:g} s to stop at once\n"
            os.write(2, message.encode())  # print would fail if the signal came in the middle of another print
        elif now - self._asked_at > ONE_SIGNAL:
            raise STOPS[signum]

    def _save(self, trainer: Trainer, name: str = "last") -> Path | None:
        if trainer.fast_dev_run:
            return None
        path = run_folder(trainer) / "checkpoints" / f"{name}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        return path

    def on_train_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step:  # gradients are being accumulated, and a checkpoint would lose them
            return
        self._seen_step = step
        if self.every_n_steps and step % self.every_n_steps == 0:
            self._saved_step = step
            self._save(trainer)
        if self.keep_every_n_steps and step % self.keep_every_n_steps == 0:
            self._save(trainer, f"step_{step:08d}")
        if step % AGREE_EVERY == 0 or trainer.world_size == 1:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        """All processes stop at the same step, or one would wait for the others for ever."""
        any_rank = trainer.strategy.reduce_boolean_decision
        if any_rank(self._asked is not None, all=False):
            signum = signal.SIGTERM if any_rank(self._asked == signal.SIGTERM, all=False) else signal.SIGINT
            path = self._save(trainer)
            step = trainer.global_step
            rank_zero_info(f"\nstopped at step {step}; go on with: python train.py fit ... --ckpt_path {path}")
            raise STOPS[signum]

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._stop_if_asked(trainer)
        if trainer.global_step != self._saved_step:
            self._save(trainer)
        self._ended = True  # nothing is lost from here on, so a signal stops at once
