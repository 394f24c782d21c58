"""Programs of the project as processes that are quick to start, and that can be struck at a chosen moment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
POLL = 0.02  # seconds


@dataclass(frozen=True)
class Moment:
    """The `call`-th call within the `entry`-th run of a function, both from 0; see `Trap`."""

    function: str
    entry: int
    call: int

    def __str__(self) -> str:
        return f"{self.function}[{self.entry}]+{self.call}"


@dataclass(frozen=True)
class Program:
    """A started program; its output and exit code are written to `folder`."""

    folder: Path
    pid: int

    @property
    def has_ended(self) -> bool:
        """Return whether there is an exit code."""
        return (self.folder / "returncode").exists()

    def wait(self, timeout: float = 120.0) -> int:
        """Return the exit code; raise a TimeoutError, after killing the program, if it does not end in time."""
        end = time.monotonic() + timeout
        while not self.has_ended:
            if time.monotonic() > end:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"still runs after {timeout:g} s:\n{self.stdout}\n{self.stderr}")
            time.sleep(POLL)
        return int((self.folder / "returncode").read_text())

    def stopped(self, timeout: float = 100.0) -> Program:
        """Wait until the program has stopped at its moment, by SIGSTOP, or has ended, and return it."""
        state, end = Path(f"/proc/{self.pid}/status"), time.monotonic() + timeout
        while not self.has_ended:
            with suppress(OSError):  # it ends just now
                if " (stopped)" in state.read_text():
                    break
            if time.monotonic() > end:
                raise TimeoutError(f"not stopped after {timeout:g} s:\n{self.stderr}")
            time.sleep(POLL)
        return self

    def send(self, number: int) -> None:
        """Send a signal to the program and the processes that it has started."""
        os.killpg(self.pid, number)

    @property
    def stdout(self) -> str:
        """The program's standard output so far."""
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The program's standard error so far."""
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line of standard error, which is the error of a user."""
        return (self.stderr.strip().splitlines() or [""])[-1]

    @property
    def steps(self) -> int:
        """Number of optimizer steps that began before the moment."""
        return int((self.folder / "steps").read_text())

    @property
    def calls(self) -> dict[str, list[int]]:
        """Number of calls within each run of the counted functions."""
        return json.loads((self.folder / "calls.json").read_text())


class Launcher:
    """Starts programs through a zygote, which starts with the first program; `folder` takes their output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._number = folder, count()
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # not of a test's own

    @cached_property
    def _zygote(self) -> subprocess.Popen[str]:
        """The zygote, ready for orders."""
        folders = os.pathsep.join(map(str, [HERE, HERE.parent, HERE.parent.parent]))
        zygote = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**self._environment, "PYTHONPATH": folders},
        )
        if zygote.stdout.readline() != "ready\n":
            raise RuntimeError("the zygote did not start")
        return zygote

    def start(
        self,
        *argv: str,
        cwd: Path,
        at: Moment | None = None,
        number: int = signal.SIGKILL,
        watched: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        inside: int = 0,
    ) -> Program:
        """Start a script (or -m and a module) with its arguments and return at once.

        Args:
            argv: the script, relative to the root of the project, and its arguments.
            cwd: its working folder.
            at: the moment at which the program is sent the signal `number`.
            number: that signal.
            watched: functions in which calls are counted, for `Program.calls`.
            environment: environment variables beside those of this process.
            inside: the first process of a node that the program runs on; 0 leaves it here.
        """
        folder = self.folder / f"program_{next(self._number)}"
        folder.mkdir(parents=True)
        for name in ("stdout", "stderr"):  # which may be read before the program has begun
            (folder / name).touch()
        trap: dict[str, Any] | None = {"functions": list(watched)} if watched else None
        if at is not None:
            trap = {"functions": [at.function], "number": number, "entry": at.entry, "call": at.call}
        order = {"argv": argv, "cwd": str(cwd), "folder": str(folder), "trap": trap, "inside": inside}
        order["environment"] = dict(environment or {})
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()
        end = time.monotonic() + 60
        while not (folder / "pid").exists():
            if time.monotonic() > end:
                raise RuntimeError("the zygote does not answer")
            time.sleep(POLL)
        return Program(folder, int((folder / "pid").read_text()))

    def run_ranks(self, size: int, *argv: str, environment: Mapping[str, str] | None = None, **options: Any) -> None:
        """Run a program on several ranks, with torchrun's variables; all ranks must succeed."""
        common = environment or {}
        started = [self.start(*argv, environment={**common, **own}, **options) for own in ranks(size)]
        for program in started:
            assert program.wait() == 0, program.stderr

    def end(self) -> None:
        """End the zygote and all programs that still run, including stopped ones."""
        if "_zygote" in vars(self):
            self._zygote.stdin.close()
            self._zygote.wait()


def ranks(size: int = 2) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each process on this machine, with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    return [{**common, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
