"""Progress of long work: a bar on a terminal; elsewhere, as in the log file of a batch job, lines.

A line is printed when work counts what is done and 20 seconds have passed since the last line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

from tqdm import tqdm

INTERVAL = 20.0  # seconds between lines
BAR = "{unit} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"  # of work without a title
ENDLESS_BAR = "{unit} {n_fmt}, {elapsed}{postfix}"


def terminal_width() -> int:
    """Return the number of columns of the terminal on standard error; 0 if it is no terminal, or has no width."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0


class Work:
    """A piece of work whose progress is shown; `track` makes it, and describes the arguments."""

    def __init__(
        self, title: str, total: int | None, unit: str | None, done: int, shown: bool, every: float = INTERVAL
    ) -> None:
        self.title, self.total, self.unit, self.shown = title, total, unit, shown
        self.done = self.initial = done
        self.note = ""  # metrics, shown after the counts
        self.every = every
        self.begun = self.last_line = time.monotonic()  # the time of the last line is kept by the outermost work
        self.printed: int | None = None  # `done` in the last line
        self.bar: tqdm | None = None

    def update(self, count: int = 1, note: str | None = None) -> None:
        """Count further work as done, and print a line if it is time; with a `note` for its end, a bar is redrawn."""
        self.done += count
        if note is not None:
            self.note = note
        if self.bar is not None and note is None:
            self.bar.update(count)
        elif self.bar is not None:
            self.bar.n = self.done
            self.bar.set_postfix_str(note)
        elif self in _RUNNING and time.monotonic() - _RUNNING[0].last_line >= self.every:
            print_line(self)

    def line(self) -> str:
        """Return the progress as a line."""
        elapsed = time.monotonic() - self.begun
        line = f"{self._amount()} after {tqdm.format_interval(elapsed)}"
        here = self.done - self.initial
        if self.total is not None and here:
            line += f", {tqdm.format_interval(elapsed * (self.total - self.done) / here)} left"
        return f"{line}, {self.note}" if self.note else line

    def _amount(self) -> str:
        if self.unit is None:
            return self.title
        if not self.title:
            return f"{self.unit} {self.done}" if self.total is None else f"{self.unit} {self.done}/{self.total}"
        total = "" if self.total is None else f"/{self.total:,}"
        plural = "es" if self.unit.endswith("ch") else "s"
        return f"{self.title}: {self.done:,}{total} {self.unit}{plural}"

    def open_bar(self, delay: float) -> None:
        """Show a bar after `delay` seconds; below another bar, it is removed at its end."""
        form = None
        if not self.title:
            form = ENDLESS_BAR if self.total is None else BAR
        counts = {"total": self.total, "initial": self.done, "unit": self.unit, "desc": self.title or None}
        place = {"file": sys.stderr, "disable": False, "leave": None, "dynamic_ncols": True}
        self.bar = tqdm(**counts, **place, delay=delay, bar_format=form, smoothing=0)  # speed of all steps, as in lines

    def close_bar(self) -> None:
        """Close the bar, if there is one; no lines follow."""
        if self.bar is not None:
            self.bar.close()


_RUNNING: list[Work] = []  # in this process, outermost first


def print_line(work: Work) -> None:
    """Print the line of running work after the titles of the work outside it; nothing if it is hidden, or has a bar."""
    if not work.shown or work not in _RUNNING or work.bar is not None:
        return
    _RUNNING[0].last_line = time.monotonic()
    work.printed = work.done
    outer = takewhile(lambda one: one is not work, _RUNNING)
    titles = [one.title for one in outer if one.shown and one.title]
    tqdm.write(": ".join([*titles, work.line()]), file=sys.stderr)
    sys.stderr.flush()


@contextmanager
def track(
    title: str = "",
    total: int | None = None,
    unit: str | None = None,
    done: int = 0,
    *,
    shown: bool = True,
    delay: float = 0.0,
    every: float = INTERVAL,
) -> Iterator[Work]:
    """Yield a counter of work whose progress is shown: `update` counts what is done.

    Args:
        title: name of the work, such as "probes"; empty for counts that their unit explains.
        total: how much there is to do; None if that is unknown.
        unit: what is counted, such as "image"; None counts nothing, and has neither bar nor lines of its own.
        done: how much was done before.
        shown: False hides this work and the work within it, as on all processes except the first.
        delay: seconds until a bar appears.
        every: seconds between lines; work within other work has the interval of the outermost.
    """
    is_hidden = not shown or (_RUNNING and not _RUNNING[-1].shown)
    work = Work(title, total, unit, done, shown=not is_hidden, every=_RUNNING[0].every if _RUNNING else every)
    _RUNNING.append(work)
    if work.shown and unit is not None and terminal_width():
        work.open_bar(delay)
    try:
        yield work
    finally:
        work.close_bar()
        _RUNNING.remove(work)
