"""Everything that reads or writes private state of Lightning, in one place to check against a new release."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.files.writing import replacing
from uvit_decay.runs.history import read_rows


def log_interrupted_step(trainer: Trainer) -> None:
    """Send the numbers of a finished step to the loggers if an exception ended it within `on_train_batch_end`.

    Lightning logs them after this hook, and a resumed run continues with the next step.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    if batches.completed < batches.processed:
        trainer._logger_connector.update_train_step_metrics()


def set_length(trainer: Trainer, steps: int) -> None:
    """Set the last optimizer step of a run that has not begun."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def count_global_batches(contents: Mapping[str, Any]) -> Any:
    """Return the number of global batches that a run has trained on, the state of its `StepLoader`."""
    return contents["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["start"]


def restore_counters(contents: dict[str, Any], trainer: Trainer, done: int, epoch: int, micro_batches: int) -> None:
    """Replace the counters of Lightning's loops by the counters of this run after the checkpoint's global batches.

    Lightning counts micro-batches, and the number per global batch may have changed. It also counts the epoch in which
    a run ends, at its last step or on a signal, as complete, so that the rest of this epoch would be left out. The new
    counters are those that Lightning saves in `on_train_batch_end` of the last micro-batch.

    Args:
        contents: contents of the checkpoint, which are changed.
        trainer: trainer of this run.
        done: number of global batches that the run has trained on.
        epoch: global batches per epoch in this run; 0 skips restoring the position within the epoch.
        micro_batches: micro-batches of a global batch in this run.
    """
    # 1. The loops of this trainer as they are before its first step, at the position of the checkpoint in the data. The
    #    stored loops are dropped: they count the micro-batches of the run before.
    step = contents["global_step"]
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


def has_version(logger: TensorBoardLogger | CSVLogger) -> bool:
    """Return whether a logger has a version, given by the user or chosen at its first use."""
    return logger._version is not None


def set_record(logger: Logger, version: int | str) -> None:
    """Let a logger that has not logged anything yet continue the record of a version or ID, unless it has one."""
    if isinstance(logger, WandbLogger):
        if logger._id is None:
            logger._id = logger._wandb_init["id"] = version
    elif isinstance(logger, TensorBoardLogger | CSVLogger) and logger._version is None:
        logger._version = version


def hide_later_steps(logger: TensorBoardLogger, step: int) -> None:
    """Let TensorBoard hide what was logged after a step, because it is logged again."""
    logger._kwargs["purge_step"] = step + 1


class RowWriter(ExperimentWriter):
    """Lightning's writer of metrics.csv, which keeps the rows of an existing file and replaces the file atomically.

    Lightning's own writer removes the file, and it truncates it to write a header with new names. Numbers that the last
    steps of the file already have are not written again: a run that was killed while it evaluated evaluates again.
    """

    def __init__(self, log_dir: str) -> None:
        self._written: set[tuple[int, str]] | None = None  # (step, name) in the last two steps of the file
        super().__init__(log_dir)

    def _check_log_dir_exists(self) -> None:
        """Do nothing; Lightning removes metrics.csv from a folder that is not empty."""

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        if self._written is None:
            self._written = self._read_last_steps()
        if step is None or not all((step, name) in self._written for name in metrics_dict):
            super().log_metrics(dict(metrics_dict), step)

    def _read_last_steps(self) -> set[tuple[int, str]]:
        """Read the names of the file's columns, and return (step, name) of the numbers in its last two steps."""
        path = Path(self.metrics_file_path)
        if not path.exists():
            return set()
        with path.open(newline="") as file:
            self.metrics_keys = next(csv.reader(file), [])
        rows = list(read_rows(path))
        last = max((step for step, _ in rows), default=0)
        return {(step, name) for step, values in rows for name in values if step >= last - 1}

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = self.metrics_file_path
        with replacing(Path(path)) as file:
            self.metrics_file_path = shutil.copyfile(path, file.name)
            super()._rewrite_with_new_header(fieldnames)
        self.metrics_file_path = path


@rank_zero_only
def keep_rows(logger: CSVLogger) -> None:
    """Let a logger continue the rows of a metrics.csv in its folder."""
    if not isinstance(logger._experiment, RowWriter):
        logger._experiment = RowWriter(logger.log_dir)
