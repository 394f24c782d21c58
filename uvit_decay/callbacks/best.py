"""The checkpoint with the best value of a metric.

Lightning's ModelCheckpoint is not its base: it sees only values that are logged with `log`, not those of generation
metrics and probes, removes the file of the former best by itself, and names its files by values.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay import history
from uvit_decay.callbacks.checkpoint import write_atomically
from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.callbacks.run_log import run_folder
from uvit_decay.history import CHECKPOINTS
from uvit_decay.runtime.errors import UserError

VALIDATION = "val/"  # how names of values of validation begin


class BestCheckpoint(Checkpoint):
    """The checkpoint of the best value so far, checkpoints/best_<metric>.ckpt; add one for each metric.

    A value is judged when the validation, or the metrics and probes of a step, have ended. The new file replaces the
    former one when it is complete. A resumed run knows the best value so far: if it finds no better one, the file
    stays in the folder of the run that did.

    Args:
        metric: a value of validation such as `val/loss`, or one in generation.jsonl or probes.jsonl, such as `fd` or
            `best_accuracy`.
        mode: whether the least (`min`) or the largest (`max`) value is the best.

    Raises:
        UserError: in fit, no callback of the run measures the metric.
    """

    def __init__(self, metric: str, mode: Literal["min", "max"] = "min") -> None:
        if not metric.replace("/", "_").isidentifier():
            raise UserError(f"metric of BestCheckpoint is a name such as val/loss or fd, got {metric!r}")
        self.metric, self.mode = metric, mode
        self.value, self.step, self.path = math.nan, -1, ""  # the best so far
        self.judged = -1  # step of the measurements that were judged last

    @property
    def state_key(self) -> str:
        """The name of this callback in checkpoints, one for each metric."""
        return self._generate_state_key(metric=self.metric, mode=self.mode)

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        write_atomically(trainer)
        measured = any(callback.history_file for callback in trainer.callbacks if isinstance(callback, Periodic))
        if stage == "fit" and not (measured or self.metric.startswith(VALIDATION)):
            raise UserError(
                f"BestCheckpoint: no callback measures {self.metric}: add GenerationMetrics or LinearProbes"
            )

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.metric.startswith(VALIDATION):
            value = trainer.callback_metrics.get(self.metric)
            if value is None:
                names = ", ".join(sorted(name for name in trainer.callback_metrics if name.startswith(VALIDATION)))
                raise UserError(f"BestCheckpoint: validation has no {self.metric}, it has {names or 'no values'}")
            self._judge(trainer, float(value))

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        """Judge what was measured at the step of the checkpoint of a resumed run: it was saved before that."""
        self._judge_measured(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != self.judged:  # not again at each micro-batch of the next step
            self._judge_measured(trainer)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._judge_measured(trainer)
        if self.path:
            rank_zero_info(f"best {self.metric}: {self.value:g} at step {self.step}, {self.path}")

    def _judge_measured(self, trainer: Trainer) -> None:
        """Judge the value in a history to which a callback has just added one."""
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, Periodic)]
        names = [c.history_file for c in callbacks if c.history_file and c.evaluated == trainer.global_step]
        if not names or self.metric.startswith(VALIDATION) or self.step == trainer.global_step:
            return
        self.judged = trainer.global_step
        folder, values = run_folder(trainer), {}
        for name in names if trainer.is_global_zero else ():
            for measurement in history.read(folder / name):
                values |= measurement.values if measurement.step == trainer.global_step else {}
        if values and self.metric not in values:
            rank_zero_info(f"BestCheckpoint: no {self.metric} is among {', '.join(sorted(values))}")
        self._judge(trainer, values.get(self.metric, math.nan))

    def _judge(self, trainer: Trainer, value: float) -> None:
        """Save if the value is the best so far; all ranks must call this, and take the value of rank 0."""
        value = trainer.strategy.broadcast(value)
        better = value < self.value if self.mode == "min" else value > self.value
        if math.isfinite(value) and (better or math.isnan(self.value)) and not trainer.fast_dev_run:
            path = run_folder(trainer) / CHECKPOINTS / f"best_{self.metric.replace('/', '_')}.ckpt"
            self.value, self.step, self.path = value, trainer.global_step, str(path)
            trainer.save_checkpoint(path, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "path": self.path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.step, self.path = state["value"], state["step"], state["path"]
