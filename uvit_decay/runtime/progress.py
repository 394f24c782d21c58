"""Progress of long work: a bar on a terminal; elsewhere, as in the log file of a batch job, a line every 20 seconds."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

# Seconds between lines; infinity shows neither lines nor bars.
_interval: ContextVar[float] = ContextVar("interval", default=20.0)


def terminal_width() -> int:
    """Return the number of columns of the terminal on standard error; 0 if it is no terminal, or has no width."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0


class Work:
    """A piece of work whose progress is shown.

    Args:
        title: its name, such as "probes"; empty for a whole command.
        total: how much there is to do; None if that is unknown.
        unit: what is counted, such as "image"; None counts nothing.
        done: how much was done before.
    """

    def __init__(self, title: str, total: int | None = None, unit: str | None = None, done: int = 0) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self.initial = done
        self.begun = time.monotonic()
        self.grace = 0.0  # seconds that a line is late, for work that prints lines itself
        self.bar: tqdm | None = None

    def update(self, count: int = 1) -> None:
        """Count further work as done."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)

    def line(self) -> str | None:
        """Return the progress as a line; None if a bar shows it."""
        if self.bar is not None:
            return None
        elapsed = time.monotonic() - self.begun
        after = f"after {tqdm.format_interval(elapsed)}"
        if self.unit is None:
            return f"{self.title or 'still running'} {after}"
        if self.total is None:
            return f"{self.title}: {self.done:,} {self.unit}s {after}"
        line = f"{self.title}: {self.done:,}/{self.total:,} {self.unit}s {after}"
        here = self.done - self.initial
        if here:
            line += f", {tqdm.format_interval(elapsed * (self.total - self.done) / here)} left"
        return line


class _Lines:
    """The lines of all work of this process, printed by a thread, so that they come however long a step takes."""

    def __init__(self) -> None:
        self.running: list[Work] = []  # outermost first
        self.last = 0.0  # time of the last line

    def print_until(self, ended: threading.Event, interval: float) -> None:
        """Print the line of the innermost work whenever there was none for `interval` seconds."""
        wait = interval
        while not ended.wait(max(wait, 0.001)):
            wait = self.last + interval + self.running[-1].grace - time.monotonic()
            if wait <= 0:
                self._print()
                wait = interval

    def _print(self) -> None:
        self.last = time.monotonic()
        line = self.running[-1].line()
        if line is None:
            return
        outer = [work.title for work in self.running[:-1] if work.title]
        tqdm.write(": ".join([*outer, line]), file=sys.stderr)
        sys.stderr.flush()


_LINES = _Lines()


def line_printed() -> None:
    """Tell that a line was printed by other means; the next one comes an interval later."""
    _LINES.last = time.monotonic()


@contextmanager
def lines_every(seconds: float) -> Iterator[None]:
    """Set the interval between lines for the work that begins in the context; infinity shows no progress at all."""
    token = _interval.set(seconds)
    try:
        yield
    finally:
        _interval.reset(token)


@contextmanager
def show(work: Work) -> Iterator[None]:
    """Print the line of this work in the context, unless other work within it has a line."""
    interval = _interval.get()
    if math.isinf(interval):
        yield
        return
    outermost = not _LINES.running
    _LINES.running.append(work)
    ended = threading.Event()
    if outermost:
        line_printed()
        printer = threading.Thread(target=_LINES.print_until, args=(ended, interval), daemon=True)
        printer.start()
    try:
        yield
    finally:
        if outermost:
            ended.set()
            printer.join()
        _LINES.running.remove(work)


@contextmanager
def track(
    title: str = "",
    total: int | None = None,
    unit: str | None = None,
    done: int = 0,
    *,
    shown: bool = True,
    delay: float = 0.0,
) -> Iterator[Work]:
    """Yield a counter of work whose progress is shown: `update` counts what is done.

    Args:
        title: name of the work, such as "probes"; empty for a whole command.
        total: how much there is to do; None if that is unknown.
        unit: what is counted, such as "image"; None counts nothing, and has no bar.
        done: how much was done before.
        shown: False shows nothing, as on all processes except the first.
        delay: seconds until a bar appears.
    """
    work = Work(title, total, unit, done)
    if not shown:
        yield work
        return
    with show(work):
        if unit is not None and terminal_width() and not math.isinf(_interval.get()):
            # Below another bar, this bar is removed at its end.
            options = {"total": total, "initial": done, "unit": unit, "desc": title, "leave": None, "delay": delay}
            work.bar = tqdm(file=sys.stderr, disable=False, **options)
        try:
            yield work
        finally:
            if work.bar is not None:
                work.bar.close()
