"""Restoring a run from a checkpoint that Lightning is loading: its data are checked, its counters are replaced."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.data.datamodule import ImageData
from uvit_decay.runs.check import check, check_data, describe_changes
from uvit_decay.runs.counters import restore_counters, run_length
from uvit_decay.runs.finish import finish


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
