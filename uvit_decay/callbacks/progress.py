"""The progress of a run: one bar on a terminal, and now and then a line where there is none."""

from __future__ import annotations

import logging
import math
import os
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

BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
LINE = "step {n_fmt}/{total_fmt} after {elapsed}, {remaining} left{postfix}"
ENDLESS_BAR, ENDLESS_LINE = "step {n_fmt}, {elapsed}{postfix}", "step {n_fmt} after {elapsed}{postfix}"
SPEED = "train/images_per_second"
HANDLERS = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]  # they print to the terminal


class Progress(TQDMProgressBar):
    """Steps of the whole run, its time and the time left, with the loss, the learning rate and images/s.

    Loss and speed, of all devices, are those of the last logged step, see --trainer.log_every_n_steps: nothing waits
    for a device. Where standard error is no terminal, as in the log file of a batch job, or one without a width, a line
    comes with the first loss, after every `line_every` seconds, and at the end.

    Args:
        every: seconds between changes of the bar.
        line_every: seconds between lines.
    """

    def __init__(self, every: float = 0.2, line_every: float = 60.0) -> None:
        super().__init__()
        check_numbers("[0, inf]", every=every, line_every=line_every)
        self.every, self.line_every = every, line_every
        self._redirected = ExitStack()
        self._begun = self._shown = 0.0  # times
        self._first = self._last = 0  # steps: at the beginning, and in what was shown last

    def init_train_tqdm(self) -> tqdm:
        total = self._total
        return self._bar(ENDLESS_BAR if total is None else f"step {BAR}", total=total, initial=self.trainer.global_step)

    def init_validation_tqdm(self) -> tqdm:
        alone = self.trainer.state.fn == TrainerFn.VALIDATING
        return self._bar(f"{{desc}}{BAR}", position=int(not alone), leave=alone)

    def init_sanity_tqdm(self) -> tqdm:
        return self.init_validation_tqdm()

    def _bar(self, form: str, **options: Any) -> tqdm:
        hidden = self.is_disabled or not _width()
        return tqdm(file=sys.stderr, disable=hidden, dynamic_ncols=True, smoothing=0, bar_format=form, **options)

    @property
    def _total(self) -> int | None:
        total = self.trainer.estimated_stepping_batches
        return None if math.isinf(total) or total < 0 else int(total)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        super().on_train_start()
        self._first = self._last = trainer.global_step
        self._begun = self._shown = time.monotonic()
        if not self.train_progress_bar.disable:
            self._redirected.enter_context(logging_redirect_tqdm(HANDLERS))

    def on_train_epoch_start(self, *_: Any) -> None:
        """Do nothing: the bar is that of the run."""

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *_: Any) -> None:
        hidden = self.train_progress_bar.disable
        first = hidden and self._last == self._first and SPEED in trainer.progress_bar_metrics
        if first or time.monotonic() - self._shown >= (self.line_every if hidden else self.every):
            self._show(trainer, task)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        if self._last < trainer.global_step:
            self._show(trainer, task)
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    def get_metrics(self, trainer: Trainer, task: LightningModule) -> dict[str, str]:
        """Return what is shown, by name: numbers of the last logged step, without "train/", and the learning rate."""
        found = {name.removeprefix("train/"): float(number) for name, number in trainer.progress_bar_metrics.items()}
        speed = found.pop(SPEED.removeprefix("train/"), None)
        if trainer.optimizers:
            found["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        shown = {name: f"{number:.3g}" for name, number in found.items()}
        return shown if speed is None else {**shown, "images/s": f"{speed:{',.0f' if speed >= 10 else '.2g'}}"}

    def _show(self, trainer: Trainer, task: LightningModule) -> None:
        """Show the present step, in the bar or in a line."""
        bar, metrics = self.train_progress_bar, self.get_metrics(trainer, task)
        self._last, self._shown = trainer.global_step, time.monotonic()
        if not bar.disable:
            bar.n = self._last
            bar.set_postfix(metrics)
        elif self.is_enabled:
            figures = {"n": self._last, "total": self._total, "initial": self._first}
            form = ENDLESS_LINE if self._total is None else LINE
            postfix = ", ".join(map("=".join, metrics.items()))
            elapsed = self._shown - self._begun
            rank_zero_info(tqdm.format_meter(**figures, elapsed=elapsed, bar_format=form, postfix=postfix))

    def _close(self) -> None:
        self._redirected.close()
        for bar in (self._val_progress_bar, self._train_progress_bar):
            if bar is not None:
                bar.close()


def _width() -> int:
    """Return the columns of the terminal that standard error is; 0 if it is none, or one that does not know them."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0
