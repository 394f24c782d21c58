"""The lock on the folder of a run while it trains.

No other program writes there, or goes on from it meanwhile.
"""

from __future__ import annotations

from contextlib import ExitStack

from lightning.pytorch import Callback, LightningModule, Trainer

from uvit_decay.callbacks.catching_up import makes_up
from uvit_decay.callbacks.run_log import RunLogger, run_folder
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import claimed


class Claim(Callback):
    """Holds the lock from `take`, before any data are read, to the end of the fit; that of a killed program is free."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._start = -1

    def take(self, trainer: Trainer) -> None:
        """Lock the run folder, on all ranks; all raise a UserError if another program holds the lock."""
        if trainer.fast_dev_run:
            return
        folder, problem = run_folder(trainer), ""
        try:
            self._held.enter_context(claimed(folder, first=trainer.is_global_zero))
        except UserError as error:
            problem = str(error)
        if problem := trainer.strategy.broadcast(problem):
            raise UserError(problem)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._start = trainer.global_step

    def teardown(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        trained = trainer.global_step not in (self._start, 0) or makes_up(trainer)
        if stage == "fit" and not trained:  # as with max_time 0
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.trained = False
        self._held.close()

    def on_exception(self, trainer: Trainer, task: LightningModule, exception: BaseException) -> None:
        self._held.close()
