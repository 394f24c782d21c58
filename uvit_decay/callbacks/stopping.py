"""The stop of a run at a signal: after its step, or at once in an evaluation.

Lightning's handlers are replaced while steps are trained. That of SIGTERM stops without saving, and on several
processes waits for the others in the middle of whatever this one does. That of SIGUSR1 in a job of SLURM writes a
checkpoint that later runs in the same folder would load in place of theirs.
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

ONE_SIGNAL = 2.0  # seconds; a repetition within them is the same signal, sent by the scheduler and by torchrun


class StopSignals(Callback):
    """Handles signals from the first step on; Lightning restores the previous handlers when the run has ended."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self.at_once = True  # raise at a signal; else remember it until the step is finished
        self.interrupted = False  # whether an evaluation was left
        self._wished_at: float | None = None  # time of the first Ctrl-C or SIGTERM

    @classmethod
    def of(cls, trainer: Trainer) -> StopSignals | None:
        """Return the one of a trainer, if it has a LastCheckpoint."""
        return next((callback for callback in trainer.callbacks if isinstance(callback, cls)), None)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self.finish_steps()
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in STOPS:
                signal.signal(number, of_this_process(self._receive))

    def finish_steps(self) -> None:
        """Begin to remember signals: there is now something to lose."""
        self.number, self._wished_at, self.at_once, self.interrupted = None, None, False, False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; stop at once at a second Ctrl-C or SIGTERM, or where nothing can be lost."""
        if self.at_once:
            self._leave(number)
        now, again = time.monotonic(), "" if number in WARNINGS else f"; again after {ONE_SIGNAL:g} s to stop at once"
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if number not in WARNINGS and self._wished_at is not None and now - self._wished_at > ONE_SIGNAL:
            raise STOPS[number]
        if self.number is None or (number not in WARNINGS and self._wished_at is None):
            # print would fail if the signal came in the middle of another print
            os.write(2, f"\n{name}: finishing this step{again}\n".encode())
        self.number = self.number or number
        if number not in WARNINGS and self._wished_at is None:
            self._wished_at = now

    def _leave(self, number: int) -> None:
        self.interrupted = True
        raise STOPS[number]

    def leave_if_due(self) -> None:
        """Leave at a signal that was received while it was only remembered."""
        if self.at_once and self.number is not None:
            self._leave(self.number)


@contextmanager
def at_signals(trainer: Trainer, leave: bool) -> Iterator[None]:
    """Let a signal `leave` the body, an evaluation, at once, or else only when the body, which writes files, is done.

    On several ranks all must finish an evaluation, or some would wait for ever.
    """
    signals = StopSignals.of(trainer)
    if signals is None or (leave and trainer.world_size > 1):
        yield
        return
    signals.at_once, before = leave, signals.at_once
    try:
        signals.leave_if_due()
        yield
    finally:
        signals.at_once = before
    signals.leave_if_due()
