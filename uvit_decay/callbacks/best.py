"""The checkpoint with the best value of a metric.

Lightning's ModelCheckpoint is not the base class: it sees only values that are logged with `log`, not the results of
generation metrics and probes, it removes the file of the former best itself, and it names files by their values.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal
from weakref import ReferenceType, ref

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.last_checkpoint import write_atomically
from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.checkpoint.io import read_training_checkpoint
from uvit_decay.runs import history
from uvit_decay.runs.folder import find_previous_run, run_folder
from uvit_decay.runs.history import CHECKPOINTS, current_name
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.typed import check_types

VALIDATION = "val/"  # prefix of the metrics of a validation


@check_types
class BestCheckpoint(Checkpoint):
    """The checkpoint of the best value so far, checkpoints/best_<metric>.ckpt; add one for each metric.

    Values are compared when the validation, or all metrics and probes of a step, have ended. The new file replaces the
    former one when it is complete. A resumed run knows the best value so far: in a new folder, the file stays in the
    folder of the run that it resumes until a better value is found.

    Args:
        metric: a validation metric such as `val/loss`, or a value in generation.jsonl or probes.jsonl, such as `fd` or
            `best_accuracy`.
        mode: whether the lowest (`min`) or the highest (`max`) value is the best.

    Raises:
        UserError: the metric is not a name; in fit, no callback of the run measures it, or the run does not validate.
    """

    def __init__(self, metric: str, mode: Literal["min", "max"] = "min") -> None:
        if not metric.replace("/", "_").isidentifier():
            raise UserError(f"metric of BestCheckpoint must be a name such as val/loss or fd, got {metric!r}")
        self.metric = metric  # as typed: the name of the file and of the callback in checkpoints
        self.mode = mode
        self._task: ReferenceType[LightningModule] | None = None  # whose values are compared
        self._forget()

    def _forget(self) -> None:
        self.value = math.nan  # the best value so far
        self.step = -1  # its step
        self.path = ""  # its checkpoint
        self.compared = -1  # step of the newest measurements that were compared

    @property
    def state_key(self) -> str:
        """The name of this callback in checkpoints, unique for each metric."""
        return self._generate_state_key(metric=self.metric, mode=self.mode)

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        write_atomically(trainer)
        if stage != "fit":
            return
        if self._task is not None and self._task() is not task:
            self._forget()  # the values of a network that was trained before with this callback
        self._task = ref(task)
        if self._is_validated:
            return
        periodic = [callback for callback in trainer.callbacks if isinstance(callback, Periodic)]
        if not any(callback.history_file for callback in periodic):
            raise UserError(
                f"BestCheckpoint: no callback measures {self.metric}: add GenerationMetrics or LinearProbes"
            )

    @property
    def _is_validated(self) -> bool:
        """True if the metric is computed in validation, not by metrics and probes."""
        return self.metric.startswith(VALIDATION)

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or not self._is_validated:
            return
        value = trainer.callback_metrics.get(self.metric)
        if value is None:
            names = sorted(name for name in trainer.callback_metrics if name.startswith(VALIDATION))
            found = ", ".join(names) or "no values"
            raise UserError(f"BestCheckpoint: validation has no {self.metric}, it has {found}")
        self._compare(trainer, float(value))

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        """Take the values at the step from which a run resumes into account: its checkpoint was saved before them."""
        if not self._is_validated:
            self._compare_measurements(trainer)
            return
        if not trainer.enable_validation:
            raise UserError(f"BestCheckpoint: this run has no validation, so no {self.metric}: give it test images")
        self._recall(trainer)

    def _recall(self, trainer: Trainer) -> None:
        """Take over the best value of a validation that came after the checkpoint from which a run resumes.

        Lightning does not repeat the validation at this step. If its value was the best, the file of the best has it.
        """
        state = None
        previous = find_previous_run(trainer)
        if previous is not None and trainer.is_global_zero:
            path = self._file_of(previous)
            if path.exists():
                contents = read_training_checkpoint(path, whole=False)
                found = contents["callbacks"].get(self.state_key)
                if found is not None and self.step < found["step"] <= trainer.global_step:
                    state = {**found, "path": str(path)}
        state = trainer.strategy.broadcast(state)
        if state is not None:
            self.load_state_dict(state)

    def _file_of(self, run: Path) -> Path:
        """Return the checkpoint of the best value in a run folder."""
        return run / CHECKPOINTS / f"best_{self.metric.replace('/', '_')}.ckpt"

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != self.compared:  # not again at each micro-batch of the next step
            self._compare_measurements(trainer)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._compare_measurements(trainer)
        if self.path:
            rank_zero_info(f"best {self.metric}: {self.value:g} at step {self.step}, {self.path}")

    def _compare_measurements(self, trainer: Trainer) -> None:
        """Compare the value that metrics or probes have measured at the present step, if there is one."""
        step = trainer.global_step
        files = []
        for callback in trainer.callbacks:
            if isinstance(callback, Periodic) and callback.history_file and callback.evaluated == step:
                files.append(callback.history_file)
        if not files or self._is_validated or self.step == step:
            return
        self.compared = step
        folder = run_folder(trainer)
        values = _read_values(folder, files, step) if trainer.is_global_zero else {}
        metric = current_name(self.metric)
        if values and metric not in values:
            rank_zero_info(f"BestCheckpoint: step {step} has no {self.metric}, it has {', '.join(sorted(values))}")
        self._compare(trainer, values.get(metric, math.nan))

    def _compare(self, trainer: Trainer, value: float) -> None:
        """Save a checkpoint if the value is the best so far; all ranks must call this, rank 0's value counts."""
        value = trainer.strategy.broadcast(value)
        better = value < self.value if self.mode == "min" else value > self.value
        first = math.isnan(self.value)
        if not math.isfinite(value) or not (better or first) or trainer.fast_dev_run:
            return
        path = self._file_of(run_folder(trainer))
        self.value = value
        self.step = trainer.global_step
        self.path = str(path)
        trainer.save_checkpoint(path, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "path": self.path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.step = state["step"]
        self.path = state["path"]


def _read_values(folder: Path, files: list[str], step: int) -> dict[str, float | None]:
    """Return the values of a step in the histories `files` of a run folder."""
    values = {}
    for file in files:
        for measurement in history.read(folder / file):
            if measurement.step == step:
                values |= measurement.values
    return values
