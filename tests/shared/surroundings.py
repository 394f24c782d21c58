"""A script of the project under odd circumstances: python surroundings.py <circumstance>[=<value>],... <script> ..."""

from __future__ import annotations

import os
import random
import resource
import runpy
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
YEARS = 30 * 365 * 86400  # seconds


def jumping_clock() -> None:
    """Let the clock jump by up to thirty years, forward or backward, at each call."""
    draw, true = random.Random(0), time.time_ns
    time.time_ns = lambda: true() + draw.randint(-YEARS, YEARS) * 10**9
    time.time = lambda: time.time_ns() / 1e9


def no_reader() -> None:
    """Let standard output be a buffered pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.stdout = os.fdopen(1, "w")


def close_streams() -> None:
    """Close all standard streams, as `<&- >&- 2>&-` does."""
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None


def full_output() -> None:
    """Let standard output be a file on a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout = os.fdopen(1, "w")


def small_files(size: str) -> None:
    """Let no file grow beyond `size` bytes, as on a full disk: Python ignores the signal."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))


def impatient(seconds: str) -> None:
    """Shorten the waits for other processes."""
    from uvit_decay.runtime import distributed

    distributed.TIMEOUT = timedelta(seconds=float(seconds))


def quick() -> None:
    """Let the small classifier train for one cycle only."""
    from uvit_decay.encoders import small_classifier

    small_classifier.CYCLES = 1


def without_posix() -> None:
    """Take away what Python lacks on Windows, `resource` and two signals, and import the package from scratch.

    psutil and Lightning, which look for a system first, keep both: they use them on Linux.
    """
    import psutil  # noqa: F401  which imports resource
    from lightning.pytorch.trainer.connectors import signal_connector

    signal_connector.signal = SimpleNamespace(**vars(signal))
    for name in [name for name in sys.modules if name.split(".")[0] in ("uvit_decay", "beartype")]:
        del sys.modules[name]
    sys.modules["resource"] = None
    del signal.SIGUSR1, signal.SIGUSR2


CIRCUMSTANCES = {
    "jumping-clock": jumping_clock,
    "no-reader": no_reader,
    "closed": close_streams,
    "full-output": full_output,
    "small-files": small_files,
    "impatient": impatient,
    "quick": quick,
    "without-posix": without_posix,
}

if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # as if the script itself were started
    for circumstance in sys.argv[1].split(","):
        name, _, value = circumstance.partition("=")
        CIRCUMSTANCES[name](*filter(None, [value]))
    sys.argv = sys.argv[2:]
    script, *args = sys.argv
    if script == "-m":
        sys.argv = args
        runpy.run_module(args[0], run_name="__main__")
    else:
        sys.argv[0] = str(ROOT / script)
        runpy.run_path(sys.argv[0], run_name="__main__")
