"""The start of a resumed run: its checkpoint is found, checked and given to the task, before any work."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.checkpoint.io import read_training_checkpoint
from uvit_decay.data.datamodule import ImageData
from uvit_decay.runs.checkpoints import NAMES, find_newest, has_newer
from uvit_decay.runs.compatibility import check, has_images
from uvit_decay.runs.folder import claim_run, find_own_run
from uvit_decay.runs.resumable import Resumable, Start
from uvit_decay.runs.settings import allows, keeps_weights


def resume(
    task: Resumable,
    trainer: Trainer,
    data: ImageData,
    chosen: str | None,
    trains: bool,
    claims: ExitStack | None,
) -> Start | None:
    """Check that a task can resume from a checkpoint, load its weights, and lock the folder in which the run goes on.

    Args:
        task: the task, with the settings of this run.
        trainer: the trainer; its loggers have the folders of earlier runs.
        data: the data of this run, perhaps not loaded yet.
        chosen: the value of --ckpt_path: a file, `last`, `auto` or None.
        trains: whether the run trains; False if it only validates.
        claims: holds the lock; None: the folder is not locked, because nothing is written.

    Returns:
        the checkpoint; None if a new run starts.
    """
    find = partial(_find_start, task, trainer, data, chosen, trains)
    start = find()
    locks = claims is not None and rank_zero_only.rank == 0
    if locks and start is not None and start.run is not None and claim_run(start.run, claims):
        start = find()  # the program that had the lock has ended by now, and saved where it stopped
    return start


def _find_start(task: Resumable, trainer: Trainer, data: ImageData, chosen: str | None, trains: bool) -> Start | None:
    """Return the checkpoint that --ckpt_path means, checked; None if a new run starts."""
    # 1. The file: by its path, or the newest one of the newest run that fits.
    if chosen is None:
        return None
    if chosen in NAMES:
        found = find_newest(chosen, task.settings, task.allowed, trainer.loggers, trainer.default_root_dir)
        if found is None:
            return None
        path, contents = found
    else:
        path = Path(chosen)
        contents = read_training_checkpoint(path)
    # 2. Its contents: of this network, and trained with these settings or with those that --resume.allow names.
    card = check(contents, task, str(path), trains)
    task.load_state_dict(contents["state_dict"])  # raises if the alphas differ
    start = Start(path, contents["global_step"], None, contents.get("settings") or {})
    # 3. The folder: a run goes on in its own one, from its newest checkpoint and with settings that keep the weights
    #    what they would have been. Everything else is another run, with a folder of its own.
    #    The cheap questions come first: the last ones read checkpoints as a whole, and load the data.
    run = find_own_run(path, trainer) if trains else None
    if run is None or not keeps_weights(start.settings, task.settings):
        return start
    if has_newer(run, start.step):
        return start
    if allows(task.allowed, "data"):
        data.load()  # otherwise other images are refused when they are set up
        if not has_images(card, data):
            return start
    return replace(start, run=run)
