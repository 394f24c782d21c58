"""The length of a run in optimizer steps."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer


def run_length(trainer: Trainer) -> tuple[int, float]:
    """Return the optimizer steps of an epoch and of the whole run, which may be infinite.

    Lightning's `estimated_stepping_batches` sets up the loader, and a resumed run would then not move it to the
    place of its checkpoint. No loader is made here, which could move images to a GPU once more.
    """
    batches = trainer.datamodule.count_train_batches()
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    total: float = math.inf
    if trainer.max_epochs not in (None, -1):
        total = epoch * max(trainer.max_epochs, 1)
    if trainer.max_steps != -1:
        total = min(total, trainer.max_steps)
    return epoch, total


def log_short_run(trainer: Trainer) -> None:
    """Let the trainer log the last step of a run that ends before --trainer.log_every_n_steps; to call in the fit."""
    every = trainer.log_every_n_steps
    total = trainer.estimated_stepping_batches  # -1 or infinite for a run without an end
    step = trainer.global_step
    if every > 0 and step < total < math.inf and total // every == step // every:
        trainer.log_every_n_steps = int(total)
