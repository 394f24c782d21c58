"""The progress of a run: one bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from uvit_decay.terminal.progress import INTERVAL, Work, print_line, track
from uvit_decay.terminal.typed import Within, check_types

SPEED = "train/images_per_second"
Tracked = AbstractContextManager[Work]
PRINTING = [logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")]  # to the terminal


@check_types
class Progress(ProgressBar):
    """Steps of the whole run, elapsed and remaining time, with the loss, the learning rate and images/s.

    Loss and speed are taken from the last logged step (--trainer.log_every_n_steps), over all devices, so that nothing
    waits for a device. If standard error is not a terminal, as in the log file of a batch job, or a terminal of unknown
    width, a line is printed with the first loss, every `line_every` seconds, and at the end. During validation and the
    evaluations of callbacks, bars and lines show how far these are.

    Args:
        every: seconds between updates of the bar.
        line_every: seconds between lines; 0 prints a line after each step.
    """

    def __init__(
        self,
        every: Annotated[float, Within("[0, inf]")] = 0.2,
        line_every: Annotated[float, Within("[0, inf]")] = INTERVAL,
    ) -> None:
        super().__init__()
        self.every = every
        self.line_every = line_every
        self.is_enabled = True
        self._run = ExitStack()  # the whole run, and its steps
        self._validation = ExitStack()
        self._steps = self._batches = Work("", None, None, 0, shown=False)  # until training, or a validation, begins
        self._updated_at = 0.0  # time of the last update of the steps
        self._has_loss = False

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def print(self, *values: Any, sep: str = " ", **options: Any) -> None:
        """Print above the bars."""
        tqdm.write(sep.join(map(str, values)), **options)

    def track(self, title: str = "", total: int | None = None, unit: str | None = None, done: int = 0) -> Tracked:
        """Show work of the run in the context as `terminal.progress.track` does, unless this callback is disabled."""
        every = self.line_every or INTERVAL
        return track(title, total, unit, done, shown=self.is_enabled, every=every)

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        super().setup(trainer, task, stage)
        self._run.enter_context(self.track())

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        known = math.isfinite(total) and total >= 0
        steps = self.track("", int(total) if known else None, "step", trainer.global_step)
        self._steps = self._run.enter_context(steps)
        self._has_loss = False
        self._updated_at = time.monotonic()
        if self._steps.bar is not None:
            self._run.enter_context(logging_redirect_tqdm(PRINTING))

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *_: Any) -> None:
        first_loss = not self._has_loss and SPEED in trainer.progress_bar_metrics
        line = first_loss or self.line_every == 0
        if line or time.monotonic() - self._updated_at >= self.every:
            self._update(trainer, task)
        if line:
            print_line(self._steps)
        self._has_loss |= first_loss

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._update(trainer, task)
        if self._steps.printed != self._steps.done:
            print_line(self._steps)
        self._steps.close_bar()  # the rest of the run has no bar

    def _update(self, trainer: Trainer, task: LightningModule) -> None:
        """Show the present step and metrics, in the bar or in the next line."""
        metrics = self.get_metrics(trainer, task)
        note = ", ".join(f"{name}={number}" for name, number in metrics.items())
        self._steps.update(trainer.global_step - self._steps.done, note)
        self._updated_at = time.monotonic()

    def on_validation_start(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.sanity_checking:
            title, batches = "sanity check", trainer.num_sanity_val_batches
        else:
            title, batches = "validation", trainer.num_val_batches
        if trainer.state.fn == TrainerFn.FITTING:
            title += f" at step {trainer.global_step}"
        total = sum(batches)
        work = self.track(title, int(total) if math.isfinite(total) else None, "batch")
        self._batches = self._validation.enter_context(work)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._batches.update()

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._validation.close()
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._update(trainer, task)  # its loss

    def on_exception(self, *_: Any) -> None:
        self._close()

    def teardown(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._validation.close()
        self._run.close()

    def get_metrics(self, trainer: Trainer, task: LightningModule) -> dict[str, str]:
        """Return the displayed numbers by name: of the last logged step, without "train/", and the learning rate."""
        shown = {}
        for name, number in trainer.progress_bar_metrics.items():
            if name != SPEED:
                shown[name.removeprefix("train/")] = f"{float(number):.3g}"
        if trainer.optimizers:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            shown["lr"] = f"{rate:.3g}"
        if SPEED in trainer.progress_bar_metrics:
            speed = float(trainer.progress_bar_metrics[SPEED])
            shown["images/s"] = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        return shown
