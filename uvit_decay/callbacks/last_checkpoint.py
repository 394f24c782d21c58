"""Training checkpoints, written atomically: at fixed steps, at the end, and when a signal stops the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.callbacks.stopping import StopSignals
from uvit_decay.files.writing import quote_path, replacing
from uvit_decay.runs.checkpoints import LAST, NEXT, finish_rotation, rotate
from uvit_decay.runs.folder import goes_on, run_folder
from uvit_decay.runs.history import CHECKPOINTS
from uvit_decay.runs.lightning_private import log_interrupted_step
from uvit_decay.runtime.signals import STOPS
from uvit_decay.terminal.program import localise
from uvit_decay.terminal.typed import Bounds, Positive, check_types

AGREE_EVERY = 10  # optimizer steps after which several ranks agree whether to stop


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint and then renames it to its target: after a crash the target is the old or the new checkpoint.

    Lightning writes to the system's temporary folder, and a move between file systems is not atomic.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save(checkpoint, file)


def write_atomically(trainer: Trainer) -> None:
    """Let the trainer write its checkpoints with `AtomicCheckpointIO`, unless it has a plugin of its own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


@check_types
class LastCheckpoint(Checkpoint):
    """Checkpoints of a run: checkpoints/last.ckpt in the run folder, written regularly, at the end and at a signal.

    The checkpoint before the newest is kept as previous.ckpt, to which --ckpt_path auto and last fall back if the
    newest is damaged.

    At Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 the run finishes its step (up to 10 steps on several ranks), saves and stops.
    A second Ctrl-C or SIGTERM, more than 2 seconds later, stops at once without saving. Resume with --ckpt_path. A
    checkpoint is saved before the previews, metrics and probes of its step run, so that their failure cannot lose it. A
    resumed run begins with the evaluations that are missing.

    Args:
        every_n_steps: optimizer steps between saves; 0 saves only at the end.
        keep_every_n_steps: optimizer steps between checkpoints that are kept as step_N.ckpt; 0 keeps none.
        keep_last: number of newest checkpoints to keep: last.ckpt, previous.ckpt, previous_2.ckpt and so on.
    """

    def __init__(
        self,
        every_n_steps: Annotated[int, Bounds(0)] = 1000,
        keep_every_n_steps: Annotated[int, Bounds(0)] = 0,
        keep_last: Positive = 2,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.keep_every_n_steps = keep_every_n_steps
        self.keep_last = keep_last
        self._seen_step = -1  # the newest step
        self._saved_step = -1  # step of last.ckpt
        self._signals: StopSignals | None = None

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        write_atomically(trainer)
        callbacks = list(trainer.callbacks)
        self._signals = StopSignals.of(trainer)
        if self._signals is None:
            self._signals = StopSignals()
            callbacks.append(self._signals)
        trainer.callbacks = sorted(callbacks, key=self._place)  # Lightning puts checkpoints last

    def _place(self, callback: Callback) -> int:
        """Return the place of a callback: this one comes before evaluations, and other checkpoints come last."""
        if callback is self:
            return 1
        if isinstance(callback, Periodic):
            return 2
        if isinstance(callback, Checkpoint):
            return 3
        return 0

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._seen_step = self._saved_step = trainer.global_step
        if not trainer.ckpt_path:
            return
        name = Path(trainer.ckpt_path).name
        if not goes_on(trainer) or name not in (LAST, NEXT):
            self._saved_step = -1  # last.ckpt is of another step, or not there
        elif name == NEXT:  # a kill interrupted the rotation
            trainer.strategy.barrier()  # by now all ranks have read the file
            if trainer.is_global_zero:
                finish_rotation(Path(trainer.ckpt_path))

    def _save(self, trainer: Trainer, name: str = NEXT) -> None:
        """Save a checkpoint, by default last.ckpt; a fast_dev_run saves nothing. All ranks must call this."""
        if trainer.fast_dev_run:
            return
        folder = run_folder(trainer) / CHECKPOINTS
        trainer.save_checkpoint(folder / name, weights_only=False)
        if name == NEXT:
            self._saved_step = trainer.global_step
            if trainer.is_global_zero:
                rotate(folder, self.keep_last)

    def on_train_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step:  # gradients are being accumulated; a checkpoint would lose them
            return
        self._seen_step = step
        is_end = step == trainer.estimated_stepping_batches
        if is_end or (self.every_n_steps and step % self.every_n_steps == 0):
            self._save(trainer)
        if self.keep_every_n_steps and step % self.keep_every_n_steps == 0:
            self._save(trainer, f"step_{step:08d}.ckpt")
        if step % AGREE_EVERY == 0 or trainer.world_size == 1:
            self._stop_if_signalled(trainer)

    def _stop_if_signalled(self, trainer: Trainer) -> None:
        """Save and stop if any rank has received a signal.

        All ranks stop at the same step, otherwise some would wait for the others without end.
        """
        any_rank = trainer.strategy.reduce_boolean_decision
        if not any_rank(self._signals.number is not None, all=False):
            return
        self._save(trainer)
        self._report_stop(trainer)
        for number, stop in STOPS.items():
            if any_rank(self._signals.number == number, all=False):
                raise stop

    def _report_stop(self, trainer: Trainer) -> None:
        path = run_folder(trainer) / CHECKPOINTS / LAST
        command = localise("python train.py fit")
        flag = f"--ckpt_path {quote_path(path)}"
        rank_zero_info(f"\nstopped at step {trainer.global_step}; resume with: {command} ... {flag}")

    def on_exception(self, trainer: Trainer, task: LightningModule, exception: BaseException) -> None:
        """Log a step that a signal has ended; save it if the signal has aborted its evaluation."""
        if isinstance(exception, KeyboardInterrupt):
            log_interrupted_step(trainer)
        if self._signals and self._signals.interrupted and isinstance(exception, KeyboardInterrupt):
            self._signals.finish_steps()  # another signal must not damage the file
            if trainer.global_step != self._saved_step:
                self._save(trainer)
            self._report_stop(trainer)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._stop_if_signalled(trainer)
        if trainer.global_step != self._saved_step:
            self._save(trainer)
        self._signals.at_once = True  # everything is saved
