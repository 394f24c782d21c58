"""Training in float16 (16-mixed): the loss is scaled, and a step whose gradient is not finite is skipped.

float16 holds numbers from 6e-8 to 65,504. Lightning's MixedPrecision multiplies the loss by the scale of a
`torch.amp.GradScaler`, so that small gradients do not vanish, and divides the gradient by it before norm and clipping.
The scaler halves its scale after a step that it skips, and doubles it after 2,000 steps in a row that it makes.
"""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.amp import GradScaler
from torch.optim import Optimizer

from uvit_decay.runtime.precision import FLOAT16
from uvit_decay.tasks.finite import KEPT
from uvit_decay.tasks.optim.options import Optimization
from uvit_decay.tasks.optim.table import OPTIMIZERS
from uvit_decay.tasks.parallel.sharding import Sharded
from uvit_decay.terminal.errors import UserError

MIXED = "MixedPrecision"  # Lightning's name of the state of a gradient scaler
SKIPPED, IN_A_ROW = "skipped_steps", "skipped_in_a_row"  # names of the counts in checkpoints
MOST = 20  # skipped steps in a row, after which the scale is a millionth of what it was


def _find_scaler(trainer: Trainer) -> GradScaler | None:
    plugin = trainer.precision_plugin
    return plugin.scaler if isinstance(plugin, MixedPrecision) else None


def scales(trainer: Trainer) -> bool:
    """Return whether a trainer scales the loss."""
    return _find_scaler(trainer) is not None


def check_sharded(trainer: Trainer, optim: Optimization) -> None:
    """Raise a UserError if a trainer shards the network, and its precision or the optimizer needs it whole."""
    if not isinstance(trainer.strategy, Sharded):
        return
    needs = ""
    rule = OPTIMIZERS.get(optim.optimizer)
    if rule is not None and rule.whole:
        needs = f"{optim.optimizer} needs whole matrices"
    elif scales(trainer):
        needs = f"`trainer.precision` {FLOAT16} needs whole gradients"  # otherwise ranks would skip different steps
    if needs:
        raise UserError(f"{needs}: set `strategy` to ddp, not fsdp")


class SkippedSteps:
    """The number of steps that a gradient scaler has skipped; nothing is counted without a scaler.

    A skipped step counts as a step of the run, and its batch is used. Weights, moments and averages stay as they are.

    Attributes:
        total: skipped steps of the run so far.
        in_row: skipped steps up to and including the newest one; 0 if the newest step was made.
    """

    def __init__(self) -> None:
        self.total = 0
        self.in_row = 0
        self._made = False  # whether the optimizer made the present step

    def watch(self, optimizer: Optimizer, trainer: Trainer) -> None:
        """Note the steps of an optimizer from now on, if the trainer scales the loss.

        Raises:
            UserError: the optimizer is fused, so that it would divide by the scale only after norm and clipping.
        """
        if not scales(trainer):
            return
        if any(group.get("fused") for group in optimizer.param_groups):
            raise UserError(f"`trainer.precision` {FLOAT16} needs an optimizer that is not fused: change `arguments`")
        optimizer.register_step_post_hook(self._note)
        # torch warns if the first step of all is skipped, because the schedule then moves before the optimizer.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

    def _note(self, *_: Any) -> None:
        self._made = True

    def count(self, task: LightningModule) -> None:
        """Count the step that a task has just ended; raise a UserError if it is the last of MOST skipped ones."""
        scaler = _find_scaler(task.trainer)
        if scaler is None:
            return
        if self._made:
            self.in_row = 0
        else:
            self.total += 1
            self.in_row += 1
        self._made = False
        if self.in_row == MOST:
            raise UserError(
                f"the gradients of the {MOST} steps up to {task.trainer.global_step} are not finite in float16 (loss "
                f"scale {scaler.get_scale():g}); {KEPT}: set `trainer.precision` to 32-true, or lower "
                f"`{task.optim.used_name('lr')}`"
            )

    def figures(self, trainer: Trainer) -> dict[str, float]:
        """Return the logged figure, if the trainer scales the loss."""
        return {"train/skipped_steps": float(self.total)} if scales(trainer) else {}

    def save(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Add the counts to a checkpoint of a run with a scaler."""
        if scales(trainer):
            checkpoint |= {SKIPPED: self.total, IN_A_ROW: self.in_row}

    def restore(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Continue the counts of a checkpoint; the scale begins anew if the run had no scaler until now."""
        self.total = checkpoint.get(SKIPPED, 0)
        self.in_row = checkpoint.get(IN_A_ROW, 0)
        if scales(trainer) and not checkpoint.get(MIXED):
            checkpoint.pop(MIXED, None)  # the empty state of bf16-mixed, which Lightning would load
