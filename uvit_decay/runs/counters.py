"""Counters of a run: its length in optimizer steps, and the position of a checkpoint in the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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


def count_global_batches(contents: Mapping[str, Any]) -> Any:
    """Return the number of global batches that a run has trained on, the state of its `StepLoader`."""
    return contents["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["start"]


def restore_counters(contents: dict[str, Any], trainer: Trainer, epoch: int, micro_batches: int) -> None:
    """Replace the counters of Lightning's loops by the counters of this run after the checkpoint's global batches.

    Lightning counts micro-batches, and the number per global batch may have changed. It also counts the epoch in which
    a run ends, at its last step or on a signal, as complete, so that the rest of this epoch would be left out. The new
    counters are those that Lightning saves in `on_train_batch_end` of the last micro-batch.

    Args:
        contents: contents of the checkpoint, which are changed.
        trainer: trainer of this run.
        epoch: global batches per epoch in this run; 0 skips restoring the position within the epoch.
        micro_batches: micro-batches of a global batch in this run.
    """
    # 1. The loops of this trainer as they are before its first step, at the position of the checkpoint in the data. The
    #    stored loops are dropped: they count the micro-batches of the run before.
    step = contents["global_step"]
    done = count_global_batches(contents)
    fit = trainer.fit_loop.state_dict()
    contents["loops"] = {"fit_loop": fit, "validate_loop": trainer.validate_loop.state_dict()}
    fit["state_dict"] = {"combined_loader": [{"start": done}]}
    # 2. `trainer.global_step` is this counter.
    steps = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    steps["total"] = {"ready": step, "completed": step}
    if not (done and epoch):
        return
    # 3. The epoch of the last batch has begun. It is not complete even if this batch is its last one, because it is not
    #    while `on_train_batch_end` runs.
    complete, position = divmod(done - 1, epoch)  # complete epochs, and the last batch of the present epoch
    for counts in fit["epoch_progress"].values():
        counts.update(ready=complete + 1, started=complete + 1, processed=complete, completed=complete)
    # 4. The last micro-batch is processed, but not completed: so Lightning knows that the checkpoint was saved within
    #    `on_train_batch_end`, and completes it.
    batches = fit["epoch_loop.batch_progress"]
    batches["is_last_batch"] = position + 1 == epoch
    for name, count in (("total", done), ("current", position + 1)):
        seen = count * micro_batches
        batches[name].update(ready=seen, started=seen, processed=seen, completed=seen - 1)
    # 5. The step of the loggers, to which Lightning adds 1 on a restart.
    fit["epoch_loop.state_dict"] = {"_batches_that_stepped": step - 1}
