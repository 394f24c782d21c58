"""Restoring a run from a checkpoint that Lightning is loading: its data are checked, its counters are replaced."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.data.datamodule import ImageData
from uvit_decay.tasks.resumption.check import check, check_data, describe_changes
from uvit_decay.tasks.resumption.finish import finish
from uvit_decay.tasks.resumption.form import count_global_batches
from uvit_decay.tasks.schedule import run_length


def restore_run(contents: dict[str, Any], task: LightningModule) -> int:
    """Check a checkpoint, print the settings that differ from it, and replace its counters.

    Counters are not replaced if a script passes its own loaders: they begin the epoch again.

    Args:
        contents: contents of the checkpoint, which are changed.
        task: task of this run, attached to its trainer.

    Returns:
        the number of images that the run has been trained on so far.

    Raises:
        RunEnded: the checkpoint is already at the end of the run, and no result is missing there.
        UserError: this run cannot resume from the checkpoint.
    """
    data = task.data
    trainer = task.trainer
    trains = trainer.state.fn == "fit"
    if not isinstance(data, ImageData):
        check(contents, task, "the checkpoint", trains, positioned=False)
        return contents.get("images_seen", 0)
    card = check(contents, task, "the checkpoint", trains)
    check_data(card, data, task.net.num_classes > 0, task.allowed)
    if trains:
        changes = describe_changes(contents, card, task, data)
        if changes:
            rank_zero_info(f"other settings than in the checkpoint: {changes}")
    step = contents["global_step"]
    epoch, total = run_length(trainer)
    if trains and step >= total > 0:
        flag = "max_steps" if total == trainer.max_steps else "max_epochs"
        finish(trainer, step, f"--trainer.{flag}")
    restore_counters(contents, trainer, epoch, data.micro_batches)
    return contents.get("images_seen", step * data.batch_size)


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
    step = contents["global_step"]
    done = count_global_batches(contents)
    fit = trainer.fit_loop.state_dict()
    contents["loops"] = {"fit_loop": fit, "validate_loop": trainer.validate_loop.state_dict()}
    fit["state_dict"] = {"combined_loader": [{"start": done}]}
    steps = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    steps["total"] = {"ready": step, "completed": step}
    if not (done and epoch):
        return
    complete, position = divmod(done - 1, epoch)  # complete epochs, and the last batch of the present epoch
    for counts in fit["epoch_progress"].values():
        counts.update(ready=complete + 1, started=complete + 1, processed=complete, completed=complete)
    batches = fit["epoch_loop.batch_progress"]
    batches["is_last_batch"] = position + 1 == epoch
    for name, count in (("total", done), ("current", position + 1)):
        seen = count * micro_batches
        batches[name].update(ready=seen, started=seen, processed=seen, completed=seen - 1)
    fit["epoch_loop.state_dict"] = {"_batches_that_stepped": step - 1}
