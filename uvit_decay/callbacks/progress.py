"""The progress of a run: one bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import logging
import math
import sys
import time
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from uvit_decay.runtime.errors import check_numbers
from uvit_decay.runtime.progress import Work, line_printed, lines_every, show, terminal_width
from uvit_decay.runtime.typed import check_types

BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
LINE = "step {n_fmt}/{total_fmt} after {elapsed}, {remaining} left{postfix}"
ENDLESS_BAR = "step {n_fmt}, {elapsed}{postfix}"
ENDLESS_LINE = "step {n_fmt} after {elapsed}{postfix}"
SPEED = "train/images_per_second"
INTERVAL = 20.0  # default of `line_every`
PRINTING = [logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")]  # to the terminal


@check_types
class Progress(TQDMProgressBar):
    """Steps of the whole run, elapsed and remaining time, with the loss, the learning rate and images/s.

    Loss and speed are taken from the last logged step (--trainer.log_every_n_steps), over all devices, so that nothing
    waits for a device. If standard error is not a terminal, as in the log file of a batch job, or a terminal of unknown
    width, a line is printed with the first loss, every `line_every` seconds, and at the end. During validation and the
    evaluations of callbacks, lines show how far these are.

    Args:
        every: seconds between updates of the bar.
        line_every: seconds between lines; 0 prints a line after each step.
    """

    def __init__(self, every: float = 0.2, line_every: float = INTERVAL) -> None:
        super().__init__()
        check_numbers("[0, inf]", every=every, line_every=line_every)
        self.every = every
        self.line_every = line_every
        self._shared = ExitStack()  # settings of the process: lines of other work, messages above the bar
        self._started_at = 0.0  # time of the start
        self._shown_at = 0.0  # time of the last update
        self._ended_at = 0.0  # time of the end of the last batch
        self._postfix = ""  # metrics of the last line
        self._first = 0  # step at the start
        self._last = 0  # step of the last update

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        super().setup(trainer, task, stage)
        interval = math.inf if self.is_disabled else self.line_every or INTERVAL
        self._shared.enter_context(lines_every(interval))
        self._shared.enter_context(show(_Run(self, min(1.0, interval))))

    def init_train_tqdm(self) -> tqdm:
        total = self._total
        form = ENDLESS_BAR if total is None else f"step {BAR}"
        return self._build_bar(form, total=total, initial=self.trainer.global_step)

    def init_validation_tqdm(self) -> tqdm:
        alone = self.trainer.state.fn == TrainerFn.VALIDATING
        return self._build_bar(f"{{desc}}{BAR}", position=int(not alone), leave=alone)

    def init_sanity_tqdm(self) -> tqdm:
        return self.init_validation_tqdm()

    def _build_bar(self, form: str, **options: Any) -> tqdm:
        hidden = self.is_disabled or not terminal_width()
        return tqdm(file=sys.stderr, disable=hidden, dynamic_ncols=True, smoothing=0, bar_format=form, **options)

    @property
    def _total(self) -> int | None:
        total = self.trainer.estimated_stepping_batches
        return None if math.isinf(total) or total < 0 else int(total)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        super().on_train_start()
        self._first = self._last = trainer.global_step
        self._started_at = self._shown_at = self._ended_at = time.monotonic()
        if not self.train_progress_bar.disable:
            self._shared.enter_context(logging_redirect_tqdm(PRINTING))

    def on_train_epoch_start(self, *_: Any) -> None:
        """Do nothing: the bar shows the whole run, not the epoch."""

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *_: Any) -> None:
        hidden = self.train_progress_bar.disable
        first_loss = hidden and self._last == self._first and SPEED in trainer.progress_bar_metrics
        interval = self.line_every if hidden else self.every
        now = time.monotonic()
        waited = now - self._shown_at
        if hidden:
            waited += now - self._ended_at  # the end of the next batch would be too late
        self._ended_at = now
        if first_loss or waited >= interval:
            self._show(trainer, task)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        if self._last < trainer.global_step:
            self._show(trainer, task)
        self._close_bars()

    def on_exception(self, *_: Any) -> None:
        self._close_bars()
        self._shared.close()

    def teardown(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        self._close_bars()
        self._shared.close()

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

    def _show(self, trainer: Trainer, task: LightningModule) -> None:
        """Show the present step, in the bar or in a line."""
        bar = self.train_progress_bar
        metrics = self.get_metrics(trainer, task)
        self._last = trainer.global_step
        self._shown_at = time.monotonic()
        if not bar.disable:
            bar.n = self._last
            bar.set_postfix(metrics)
        elif self.is_enabled:
            self._postfix = ", ".join(f"{name}={number}" for name, number in metrics.items())
            rank_zero_info(self._line())
            line_printed()

    def _line(self) -> str:
        """Return the line of the step that was shown last, with the present time."""
        total = self._total
        return tqdm.format_meter(
            n=self._last,
            total=total,
            initial=self._first,
            elapsed=time.monotonic() - self._started_at,
            bar_format=ENDLESS_LINE if total is None else LINE,
            postfix=self._postfix,
        )

    def line_of_long_step(self) -> str | None:
        """Return a line for a step that takes longer than `line_every`; None before the training."""
        if not self._started_at:
            return None
        self._last = self.trainer.global_step
        self._shown_at = time.monotonic()
        return self._line()

    def _close_bars(self) -> None:
        for bar in (self._val_progress_bar, self._train_progress_bar):
            if bar is not None:
                bar.close()


class _Run(Work):
    """A whole run, whose lines `Progress` prints after steps; one during a long step comes `grace` seconds later."""

    def __init__(self, progress: Progress, grace: float) -> None:
        super().__init__("")
        self.progress, self.grace = progress, grace

    def line(self) -> str | None:
        if terminal_width():
            return None
        return self.progress.line_of_long_step() or super().line()
