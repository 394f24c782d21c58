"""Signals that stop a program: Ctrl-C, SIGTERM, and SIGUSR1 and SIGUSR2, by which schedulers warn."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from uvit_decay.terminal.errors import Preempted, Terminated

Handler = Callable[[int, FrameType | None], None]

_KNOWN = vars(signal)
WARNINGS: tuple[int, ...] = tuple(_KNOWN[name] for name in ("SIGUSR1", "SIGUSR2") if name in _KNOWN)  # not on Windows
STOPS: dict[int, type[KeyboardInterrupt]] = {
    signal.SIGTERM: Terminated,
    **dict.fromkeys(WARNINGS, Preempted),
    signal.SIGINT: KeyboardInterrupt,
}


def of_this_process(handler: Handler) -> Handler:
    """Return `handler` for this process only: processes forked later ignore signals, but end at a second SIGTERM.

    Otherwise a signal sent to the process group would kill the data-loading workers, and the current step could not be
    finished. The workers end when this process ends.
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
