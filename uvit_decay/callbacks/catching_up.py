"""What the run before did not come to do at the step of the checkpoint from which a run goes on.

A checkpoint is saved as soon as its step is done. Its numbers are logged, and the network is validated and evaluated,
only after that; a run that was stopped or killed in between has lost them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.callbacks.run_log import RunLogger, continued_folder
from uvit_decay.checkpoint.newest import run_of
from uvit_decay.history import METRICS, read_rows
from uvit_decay.runtime.errors import RunEnded


def numbers_to_log(trainer: Trainer) -> dict[str, float]:
    """Return the training numbers that Lightning logs after this step, without speeds; empty if it logs none."""
    connector = trainer._logger_connector
    if not (trainer.training and _is_between(trainer) and connector.should_update_logs):
        return {}
    return {name: float(value) for name, value in connector.metrics["log"].items()}


def catch_up(trainer: Trainer, row: Mapping[str, float]) -> None:
    """Log what the log of the run before lacks of its last step: `row`, numbers of training, and the validation."""
    if not continued_folder(trainer) or trainer.fast_dev_run:
        return
    for logger in _logs(trainer):
        if row and trainer.is_global_zero:
            logger.complete(row, _logged_at(trainer))
    if _lacks_validation(trainer):
        _validate(trainer)


def _logs(trainer: Trainer) -> list[RunLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, RunLogger)]


def _is_between(trainer: Trainer) -> bool:
    """Return whether the last step is done, but its numbers are not logged yet; so are checkpoints of a step."""
    done = trainer.fit_loop.epoch_loop.batch_progress.total
    return done.completed < done.processed


def _logged_at(trainer: Trainer) -> int:
    """Return the step under which Lightning logs the numbers of training, and of validation, after the last step."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _lacks_validation(trainer: Trainer) -> bool:
    """Return whether validation was due at the last step of the run before, but is not in its log."""
    earlier, loop = continued_folder(trainer), trainer.fit_loop
    if not (earlier and _logs(trainer) and loop.restarting and _is_between(trainer)):
        return False
    if not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
        return False
    return trainer.strategy.broadcast(trainer.is_global_zero and not validated(earlier, trainer))


def validated(folder: Path, trainer: Trainer) -> dict[str, float]:
    """Return the results of validation at the last step of a run, from the log in its folder, on rank 0."""
    return _validated(folder, _logged_at(trainer)) if trainer.is_global_zero else {}


def _validated(folder: Path, logged_at: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for step, values in read_rows(folder / METRICS):
        found |= {name: float(x) for name, x in values.items() if step == logged_at and name.startswith("val/")}
    return found


def lacks_evaluations(trainer: Trainer) -> bool:
    """Return whether a run that goes on from the last step of another one has to do what that was killed before."""
    periodic = (callback for callback in trainer.callbacks if isinstance(callback, Periodic))
    return _lacks_validation(trainer) or any(callback.to_end(trainer) for callback in periodic)


def is_finished(trainer: Trainer, path: Path, step: int) -> bool:
    """Return whether the run that wrote a checkpoint at its last step lacks no evaluation; called before a fit."""
    folder = run_of(path)
    if folder is None:
        return True
    at_end = (callback for callback in trainer.callbacks if isinstance(callback, Periodic) and callback.at_end)
    every, by_steps = trainer.val_check_interval, trainer.check_val_every_n_epoch is None
    validates = bool(trainer.limit_val_batches) and by_steps and isinstance(every, int) and step % every == 0
    return all(callback.recorded(folder, step) for callback in at_end) and (
        not validates or bool(_validated(folder, step - 1))
    )


def _validate(trainer: Trainer) -> None:
    """Validate as Lightning does after a step."""
    loop, first = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector._first_loop_iter
    loop.restarting = False
    trainer.validating = True
    loop.run()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = first
    loop._has_run = False  # as it would be without this


class FitLoop(_FitLoop):
    """Lightning's loop of a fit, which does at the last step, too, what the run before was killed before."""

    makes_up = False  # whether this run does that alone, and no step

    @property
    def skip(self) -> bool:
        """Return whether there is nothing to do; raise RunEnded if that is so because the run has ended before."""
        trainer = self.trainer
        if not super().skip or trainer.limit_train_batches == 0 or not trainer.ckpt_path:
            return super().skip
        if not lacks_evaluations(trainer):
            end = "max_steps" if trainer.global_step == trainer.max_steps else "max_epochs"
            raise RunEnded(f"the checkpoint is at step {trainer.global_step}, the end: set --trainer.{end} higher")
        self.makes_up = True
        return False


def makes_up(trainer: Trainer) -> bool:
    """Return whether a run only does what the run before was killed before."""
    return isinstance(trainer.fit_loop, FitLoop) and trainer.fit_loop.makes_up


def finishing(trainer: Trainer) -> Trainer:
    """Let a trainer that has not begun do the evaluations that its run before did not come to do; return it."""
    before = trainer.fit_loop
    trainer.fit_loop = FitLoop(trainer, min_epochs=before.min_epochs, max_epochs=before.max_epochs)
    trainer.fit_loop.epoch_loop = before.epoch_loop
    return trainer
