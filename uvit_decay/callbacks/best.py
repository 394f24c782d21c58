"""The checkpoint with the best value of a metric: Lightning's ModelCheckpoint, also for metrics and probes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal
from weakref import ReferenceType, ref

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.last_checkpoint import write_atomically
from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.checkpoint.io import read_training_checkpoint
from uvit_decay.runs.folder import goes_on, run_folder
from uvit_decay.runs.history import CHECKPOINTS
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types

VALIDATION = "val/"  # prefix of the metrics of a validation


@check_types
class BestCheckpoint(ModelCheckpoint):
    """The checkpoint of the best value so far, checkpoints/best_<metric>.ckpt; add one for each metric.

    Values are compared when the validation, or all metrics and probes of a step, have ended. The new file replaces the
    former one when it is complete. A run that goes on in its folder knows the best value so far; in another folder, and
    for a second network, comparisons begin again.

    Args:
        metric: a validation metric such as `val/loss`, or a value in generation.jsonl or probes.jsonl, such as `fd` or
            `best_accuracy`.
        mode: whether the lowest (`min`) or the highest (`max`) value is the best.
    """

    def __init__(self, metric: str, mode: Literal["min", "max"] = "min") -> None:
        super().__init__(
            filename=f"best_{metric.replace('/', '_')}",
            monitor=metric,
            mode=mode,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self._is_validated = metric.startswith(VALIDATION)  # otherwise metrics or probes measure it
        self._compared: list[int] = []  # `_list_measured` at the newest comparison
        self._stored: dict[str, Any] = {}  # the state in the checkpoint from which the run resumes
        self._task: ReferenceType[LightningModule] | None = None  # whose values are compared

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self._task is not None and self._task() is not task:
            self.__init__(self.monitor, self.mode)  # a second network: comparisons begin again
        self._task = ref(task)
        write_atomically(trainer)
        if not self._is_validated and not _list_measured(trainer):
            raise UserError(
                f"BestCheckpoint: no callback measures {self.monitor}: add GenerationMetrics or LinearProbes"
            )
        self.dirpath = str(run_folder(trainer) / CHECKPOINTS)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Checkpoint directory")  # which is not empty if the run goes on
            super().setup(trainer, task, stage)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        super().on_train_start(trainer, task)
        if self._is_validated and not trainer.enable_validation:
            raise UserError(f"BestCheckpoint: this run has no validation, so no {self.monitor}: give it test images")
        self._compared = _list_measured(trainer)
        self._recall(trainer)
        if not self._is_validated and self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, task)  # measured now, because the resumed run lacked it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts, when the folder of the run is known."""
        self._stored = state

    def _recall(self, trainer: Trainer) -> None:
        """Continue the comparisons of a run that goes on in its folder, which may have been moved meanwhile.

        The checkpoint of the run was saved before the evaluations of its step, which are not repeated. If one of them
        was the best, the file of the best has it.
        """
        if not goes_on(trainer):
            return
        path = Path(self.format_checkpoint_name({}))
        state = self._stored
        if trainer.is_global_zero and path.exists():
            contents = read_training_checkpoint(path, whole=False)
            if contents["global_step"] <= trainer.global_step:
                state = contents["callbacks"].get(self.state_key, state)
        state = trainer.strategy.broadcast(state)
        if state.get("best_model_path"):
            self.best_model_path = self.kth_best_model_path = str(path)
            self.best_model_score = self.kth_value = state["best_model_score"]
            self.best_k_models = {str(path): self.best_model_score}

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        if self._is_validated:
            super().on_validation_end(trainer, task)

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *_: Any) -> None:
        self._compare_measurements(trainer, task)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._compare_measurements(trainer, task)
        if self.best_model_path:
            rank_zero_info(f"best {self.monitor}: {float(self.best_model_score):g}, {self.best_model_path}")

    def _compare_measurements(self, trainer: Trainer, task: LightningModule) -> None:
        """Compare the value that metrics or probes have measured at the present step; all ranks must call this."""
        step = trainer.global_step
        measured = _list_measured(trainer)
        if self._is_validated or step not in measured or measured == self._compared:
            return
        self._compared = measured
        if self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, task)
        else:
            names = ", ".join(sorted(trainer.callback_metrics))
            rank_zero_info(f"BestCheckpoint: step {step} has no {self.monitor}, it has {names}")


def _list_measured(trainer: Trainer) -> list[int]:
    """Return the step of the newest evaluation of each callback that measures something."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, Periodic)]
    return [callback.evaluated for callback in callbacks if callback.history_file]
