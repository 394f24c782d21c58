"""Everything that reads or writes private state of Lightning, in one place to check against a new release."""

from __future__ import annotations

from lightning.pytorch import Trainer


def log_interrupted_step(trainer: Trainer) -> None:
    """Send the numbers of a finished step to the loggers if an exception ended it within `on_train_batch_end`.

    Lightning logs them after this hook, and a resumed run continues with the next step.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    if batches.completed < batches.processed:
        trainer._logger_connector.update_train_step_metrics()
