"""The start of a resumed run: its checkpoint is found, checked and given to the task, before any work."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from uvit_decay.runs.check import check
from uvit_decay.runs.checkpoints import NAMES, Checkpoints, find_newest


def resume(
    task: LightningModule, trainer: Trainer, chosen: str | None, checkpoints: Checkpoints, trains: bool
) -> tuple[Path, int] | None:
    """Check that a task can resume from a checkpoint, and load its weights.

    Args:
        task: the task, with the settings of this run.
        trainer: the trainer; its loggers have the folders of earlier runs.
        chosen: the value of --ckpt_path: a file, `last`, `auto` or None.
        checkpoints: the files that were opened so far; they are closed.
        trains: whether the run trains; False if it only validates.

    Returns:
        the file and its step; None if a new run starts.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or this run differs in what must be equal.
    """
    with checkpoints:
        path = _find_file(task, trainer, chosen, checkpoints)
        if path is None:
            return None
        contents = checkpoints.read(path, whole=True)
        check(contents, task, str(path), trains)
        task.load_state_dict(contents["state_dict"])  # raises if the alphas differ
        step = contents["global_step"]
    task.start = (str(path), step)
    return path, step


def _find_file(task: LightningModule, trainer: Trainer, chosen: str | None, checkpoints: Checkpoints) -> Path | None:
    """Return the file that --ckpt_path means; None if a new run starts."""
    if chosen is None:
        return None
    if chosen not in NAMES:
        return Path(chosen)
    root = trainer.default_root_dir
    return find_newest(chosen, task.settings, task.allowed, trainer.loggers, root, checkpoints)
