"""Restoring a run from a checkpoint that Lightning is loading: its data, its counters, and the length of the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.checkpoint.io import ModelCard
from uvit_decay.data.datamodule import ImageData
from uvit_decay.runs import history
from uvit_decay.runs.compatibility import check, check_data, describe_changes
from uvit_decay.runs.folder import find_previous_run, run_folder
from uvit_decay.runs.history import HISTORIES, METRICS
from uvit_decay.runs.lightning_private import count_global_batches, keep_rows, restore_counters
from uvit_decay.runs.resumable import Resumable
from uvit_decay.terminal.errors import RunEnded, UserError, explain


@runtime_checkable
class KeepsHistory(Protocol):
    """A callback that keeps a history in the run folder."""

    history_file: str | None  # its name; None if it keeps none


def restore_run(contents: dict[str, Any], task: Resumable) -> int:
    """Check a checkpoint, print the settings that differ from it, and replace its counters.

    Counters are not replaced if a script passes its own loaders: they begin the epoch again.

    Args:
        contents: contents of the checkpoint, which are changed.
        task: task of this run, attached to its trainer.

    Returns:
        the number of images that the run has been trained on so far.

    Raises:
        RunEnded: the checkpoint is already at the end of the run.
    """
    data = task.data
    trainer = task.trainer
    trains = trainer.state.fn == "fit"
    has_position = isinstance(data, ImageData)  # a script's own loaders begin the epoch again
    # 1. The file was read again, and scripts have not checked it at all.
    card = check(contents, task, "the checkpoint", trains)
    seen = contents.get("images_seen", 0)
    if has_position:
        seen = _restore_position(contents, card, task)
    # 4. Nothing can be refused any more: the histories end where training begins.
    if trains:
        continue_histories(trainer, contents["global_step"])
    return seen


def _restore_position(contents: dict[str, Any], card: ModelCard, task: Resumable) -> int:
    """Check the data and the length of the run, and replace the counters; return the number of images seen so far."""
    data = task.data
    trainer = task.trainer
    step = contents["global_step"]
    # 2. The images: only now are they known.
    check_data(card, data, task.net.num_classes > 0, task.allowed)
    epoch, total = run_length(trainer)
    if trainer.state.fn == "fit":
        changes = describe_changes(contents, card, task, data)
        _check_cooldown(contents, task, total)
        if changes:
            rank_zero_info(f"other settings than in the checkpoint: {changes}")
        # 3. The end of the run.
        if step >= total > 0:
            limit = "max_steps" if total == trainer.max_steps else "max_epochs"
            raise RunEnded(f"the checkpoint is at step {step}, the end: set `{limit}` higher to resume")
    with explain("the checkpoint has no place in the data, as of a script's own loader", LookupError, TypeError):
        done = count_global_batches(contents)
    restore_counters(contents, trainer, done, epoch, data.micro_batches)
    return contents.get("images_seen", step * data.batch_size)


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


def _check_cooldown(contents: dict[str, Any], task: Resumable, total: float) -> None:
    """Raise a UserError if a cool-down that the run of the checkpoint had not begun would have begun before it.

    The learning rate would fall at once, and the run would end as no run with this schedule from the beginning does.
    If the checkpoint has cooled down and the rate rises again, one line says so.
    """
    step = contents["global_step"]
    optim = task.optim
    before = contents.get("settings", {})
    if optim.schedule != "wsd" or "model.optim.schedule" not in before:
        return
    is_same = before["model.optim.schedule"] == "wsd" and before.get("model.optim.cooldown") == optim.cooldown
    end = before.get("trainer.max_steps", -1)
    is_cooling = is_same and (end == -1 or step > end - optim.cooldown)
    begins = total - optim.cooldown
    if step > begins and not is_cooling:
        raise UserError(
            f"the checkpoint is of step {step}, but `cooldown` {optim.cooldown} begins at {begins:g}: set "
            f"`max_steps` {step + optim.cooldown} or more"
        )
    if is_cooling and end != -1 and step <= begins:
        rank_zero_info(
            f"warning: the checkpoint of step {step} has cooled down, and its learning rate rises to the peak again: "
            f"better resume from a checkpoint up to step {end - optim.cooldown}"
        )


def continue_histories(trainer: Trainer, step: int) -> None:
    """Let the histories of a resumed run end at `step`, in its own folder or copied to a new one.

    A kill during this leaves each history complete, in its old or its new version. All ranks must call this.
    """
    previous = find_previous_run(trainer)
    if previous is None or trainer.fast_dev_run:
        return
    folder = run_folder(trainer)  # on all ranks, before the others leave
    if not trainer.is_global_zero:
        return
    if folder.resolve() == previous.resolve():
        previous = folder  # one path: the files are cut in place instead of copied
    names = set(HISTORIES)
    for callback in trainer.callbacks:
        if isinstance(callback, KeepsHistory) and callback.history_file:
            names.add(callback.history_file)
    for name in names:
        history.cut(step, previous / name, folder / name)
    history.cut_rows(step, previous / METRICS, folder / METRICS)
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):  # in the run folder, or in one of its own
            path = Path(logger.log_dir) / METRICS
            history.cut_rows(step, path, path)
            keep_rows(logger)
