"""Signals that stop a program: Ctrl-C, SIGTERM, and SIGUSR1 and SIGUSR2, by which schedulers warn."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from uvit_decay.runtime.errors import Preempted, Terminated

Handler = Callable[[int, FrameType | None], None]

STOPS: dict[int, type[KeyboardInterrupt]] = {
    signal.SIGTERM: Terminated,
    signal.SIGUSR1: Preempted,
    signal.SIGUSR2: Preempted,
    signal.SIGINT: KeyboardInterrupt,
}
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


def of_this_process(handler: Handler) -> Handler:
    """Return `handler` for this process; one that is forked later ignores the signal, and ends at a second SIGTERM.

    A signal to the whole group would else end the processes that read images, and the step could not be finished. They
    end with this process.
    """
    pid = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            handler(number, frame)
        elif number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

    return handle


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """Raise the exception of a signal."""
    raise STOPS[number]


@contextmanager
def stoppable() -> Iterator[None]:
    """Let signals raise their exceptions in the body, from its first line on."""
    before = {number: signal.signal(number, of_this_process(stop_at_once)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
