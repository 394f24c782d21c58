"""The stop of a run at a signal: after its step, or at once in an evaluation.

Lightning's handlers are replaced during training. Its handler of SIGTERM stops without saving, and on several processes
it waits for the others at an arbitrary point of the program. Its handler of SIGUSR1 in a SLURM job writes a checkpoint
that later runs in the same folder would load instead of their own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch import Callback, LightningModule, Trainer

from uvit_decay.runtime.signals import STOPS, WARNINGS, of_this_process

# Seconds within which a repeated signal counts as the same one, sent by both the scheduler and torchrun.
ONE_SIGNAL = 2.0


class StopSignals(Callback):
    """Handles signals from the first step on; Lightning restores the previous handlers when the run has ended."""

    def __init__(self) -> None:
        self.number: int | None = None  # number of the first signal
        self.at_once = True  # whether to raise at a signal; otherwise it is remembered until the step is finished
        self.interrupted = False  # whether an evaluation was aborted
        self._stop_asked_at: float | None = None  # time of the first Ctrl-C or SIGTERM

    @classmethod
    def of(cls, trainer: Trainer) -> StopSignals | None:
        """Return the StopSignals of a trainer; None without a LastCheckpoint."""
        return next((callback for callback in trainer.callbacks if isinstance(callback, cls)), None)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self.finish_steps()
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for number in STOPS:
                signal.signal(number, of_this_process(self._receive))

    def finish_steps(self) -> None:
        """Begin to remember signals until the step is finished: from now on there is something to lose."""
        self.number = None
        self.at_once = False
        self.interrupted = False
        self._stop_asked_at = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; stop at once at a second Ctrl-C or SIGTERM, or if nothing can be lost."""
        if self.at_once:
            self._abort(number)
        now = time.monotonic()
        asks_to_stop = number not in WARNINGS
        first_stop = asks_to_stop and self._stop_asked_at is None
        if asks_to_stop and self._stop_asked_at is not None and now - self._stop_asked_at > ONE_SIGNAL:
            raise STOPS[number]
        if self.number is None or first_stop:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            again = f"; again after {ONE_SIGNAL:g} s to stop at once" if asks_to_stop else ""
            # print would fail if the signal came in the middle of another print
            os.write(2, f"\n{name}: finishing this step{again}\n".encode())
        if self.number is None:
            self.number = number
        if first_stop:
            self._stop_asked_at = now

    def _abort(self, number: int) -> None:
        self.interrupted = True
        raise STOPS[number]

    def abort_if_due(self) -> None:
        """Abort the evaluation if a signal was remembered and signals count at once by now."""
        if self.at_once and self.number is not None:
            self._abort(self.number)


@contextmanager
def at_signals(trainer: Trainer, leave: bool) -> Iterator[None]:
    """Handle signals in the body at once or after it.

    Args:
        trainer: the trainer of the run.
        leave: True: a signal aborts the body (an evaluation) at once. On several ranks all finish the evaluation,
            otherwise some would wait for the others without end. False: a signal is handled after the body, so that
            files are written completely.
    """
    signals = StopSignals.of(trainer)
    if signals is None or (leave and trainer.world_size > 1):
        yield
        return
    before = signals.at_once
    signals.at_once = leave
    try:
        signals.abort_if_due()
        yield
    finally:
        signals.at_once = before
    signals.abort_if_due()
