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
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from uvit_decay.runtime.errors import UserError

BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
LINE = "step {n_fmt}/{total_fmt} after {elapsed}, {remaining} left{postfix}"
ENDLESS_BAR, ENDLESS_LINE = "{n_fmt}, {elapsed}{postfix}", "step {n_fmt} after {elapsed}{postfix}"
SPEED, RATE = "train/images_per_second", "images/s"  # as it is logged, as it is shown
HANDLERS = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]  # they print to the terminal


class Progress(ProgressBar):
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
        for name, seconds in (("every", every), ("line_every", line_every)):
            if not seconds >= 0:  # NaN, too
                raise UserError(f"{name} takes seconds from 0, got {seconds}")
        self.every, self.line_every = every, line_every
        self._enabled = True
        self._bar: tqdm | None = None
        self._redirected = ExitStack()
        self._begun = self._shown = 0.0  # times
        self._first = self._last = 0  # steps: at the beginning, and in the newest line
        self._total: int | None = None

    def disable(self) -> None:
        """Show nothing from now on; Lightning disables all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        self._total = None if math.isinf(total) or total < 0 else int(total)
        self._first = self._last = trainer.global_step
        self._begun = self._shown = time.monotonic()
        if self._enabled:
            self._open("step", self._total, self._first)

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, *_: Any) -> None:
        self._show(trainer)

    def on_validation_start(self, trainer: Trainer, task: LightningModule) -> None:
        if self._enabled and trainer.state.fn == TrainerFn.VALIDATING:
            self._open("validation", _batches(trainer))

    def on_validation_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Any, index: int, dataloader: int = 0
    ) -> None:
        done, total = index + 1, _batches(trainer)
        if self._bar is None or not (self._is_time(self.every) or done == total):
            return
        if trainer.state.fn == TrainerFn.FITTING:
            self._bar.set_description_str(f"validation {done}/{total}, ")
        else:
            self._bar.n = done
            self._bar.refresh()

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._close()
        elif self._bar is not None:
            self._bar.set_description_str("", refresh=False)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        if self._last < trainer.global_step:
            self._show(trainer, at_once=True)
        self._close()

    def on_exception(self, trainer: Trainer, task: LightningModule, exception: BaseException) -> None:
        self._close()

    def get_metrics(self, trainer: Trainer, task: LightningModule) -> dict[str, Any]:
        """Return what is shown, by name: numbers of the last logged step, without "train/", and the learning rate."""
        logged = {name.removeprefix("train/"): number for name, number in trainer.progress_bar_metrics.items()}
        speed = logged.pop(SPEED.removeprefix("train/"), None)
        if trainer.optimizers:
            logged["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        return logged if speed is None else {**logged, RATE: speed}

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        tqdm.write(" ".join(map(str, args)), **kwargs)

    def _open(self, what: str, total: int | None, first: int = 0) -> None:
        if _width():
            form = f"{{desc}}{what} {ENDLESS_BAR if total is None else BAR}"
            self._bar = tqdm(total=total, initial=first, dynamic_ncols=True, smoothing=0, bar_format=form)
            self._redirected.enter_context(logging_redirect_tqdm(HANDLERS))

    def _close(self) -> None:
        self._redirected.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _is_time(self, seconds: float) -> bool:
        """Return whether it is that long since anything was shown, and if so take now for that time."""
        now = time.monotonic()
        if now - self._shown < seconds:
            return False
        self._shown = now
        return True

    def _show(self, trainer: Trainer, at_once: bool = False) -> None:
        first = self._bar is None and self._last == self._first and SPEED in trainer.progress_bar_metrics
        wait = self.every if self._bar is not None else self.line_every
        if not self._enabled or not self._is_time(0 if first or at_once else wait):
            return
        text = _in_words(self.get_metrics(trainer, trainer.lightning_module))
        self._last = trainer.global_step
        if self._bar is not None:
            self._bar.n = self._last
            self._bar.set_postfix_str(text)
            return
        figures = {"n": self._last, "total": self._total, "initial": self._first, "elapsed": self._shown - self._begun}
        form = ENDLESS_LINE if self._total is None else LINE
        rank_zero_info(tqdm.format_meter(**figures, bar_format=form, postfix=text))


def _width() -> int:
    """Return the columns of the terminal that standard error is; 0 if it is none, or one that does not know them."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0


def _batches(trainer: Trainer) -> int:
    return int(sum(trainer.num_val_batches))


def _in_words(metrics: dict[str, Any]) -> str:
    """Return names and numbers in a line, such as `loss 0.123, lr 0.003, 512 images/s`."""
    words = [f"{name} {float(number):.3g}" for name, number in metrics.items() if name != RATE]
    speed = metrics.get(RATE)
    return ", ".join(words if speed is None else [*words, f"{speed:{',.0f' if speed >= 10 else '.2g'}} {RATE}"])
