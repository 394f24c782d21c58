"""Run cases in a forked process with limits: what a changed file leads to, and what it costs.

A case is a kind of file, a seed and a number; they determine the file that is changed and how. It ends well if what was
written is read, or what its kind allows, or if a UserError of one line names the file. It fails with any other
exception, another value, a process or a network connection that is started, a file outside its folder, more time or
memory than the bounds, and when its process dies or never answers.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from bytewise import BYTES, PLACES, pipe
from kind import Kind, digest

from uvit_decay.runtime.errors import LONGEST, UserError

SECONDS, MEGABYTES = 5.0, 500.0  # of CPU time, and above the memory at the start
PATIENCE = 60.0  # seconds of the clock after which a case counts as one that never ends
ADDRESSES = 2**33  # bytes of addresses that a process may have beyond those at its start
STARTED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pty.spawn")
CONNECTED = ("socket.connect", "socket.getaddrinfo", "socket.bind")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGED = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree")


@dataclass(frozen=True)
class Outcome:
    """What a case led to: `same`, `other`, `refused` or `failed`, with the reason, and what it cost."""

    number: int
    result: str
    reason: str = ""
    milliseconds: float = 0.0
    megabytes: float = 0.0


def run(kind: Kind, name: str, template: Path, seed: int, numbers: range) -> list[Outcome]:
    """Run cases one after the other; a process that dies or hangs fails its case, and another goes on."""
    waiting, outcomes = list(numbers), []
    while waiting:
        parent, child = get_context("fork").Pipe()
        process = get_context("fork").Process(
            target=_cases, args=(kind, name, template, seed, waiting, child), daemon=True
        )
        process.start()
        child.close()
        answered = list(_answers(parent))
        outcomes += answered
        waiting = waiting[len(answered) :]
        process.kill()
        process.join()
        if waiting:
            outcomes.append(
                Outcome(waiting.pop(0), "failed", f"no answer, or a process that died ({process.exitcode})")
            )
    return outcomes


def _answers(connection: Connection) -> Iterator[Outcome]:
    with contextlib.suppress(EOFError):
        while connection.poll(PATIENCE):
            yield connection.recv()


def _cases(kind: Kind, name: str, template: Path, seed: int, numbers: list[int], connection: Connection) -> None:
    """Run cases in this process, which is a fork with limits, and send their outcomes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, used + ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    here = template.parent / f"case{os.getpid()}"
    (here / "out").mkdir(parents=True)
    log = (here.parent / f"{here.name}.log").open("w")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    _Watch(here)
    originals: dict[str, Any] = {}
    for number in numbers:
        connection.send(Case(kind, f"{name} {seed} {number}", template, here, originals, log.name).outcome(number))
    connection.close()
    os._exit(0)


class _Watch:
    """An audit hook that notes processes, connections, and changes of files outside a folder."""

    noted: list[str] = []

    def __init__(self, folder: Path) -> None:
        self.inside = (str(folder), "/dev/null", "/proc/self/clear_refs", str(folder.parent / "cache"))
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple) -> None:
        if event in STARTED + CONNECTED:
            self.noted.append(f"{event} {args!r}"[:200])
        elif event == "open" and isinstance(args[0], str | bytes | os.PathLike) and args[2] & WRITING:
            self._change(event, args[0])
        elif event in CHANGED:
            self._change(event, args[1] if event in ("os.symlink", "os.link") else args[0])

    def _change(self, event: str, path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike) and not os.path.abspath(os.fsdecode(path)).startswith(
            self.inside
        ):
            self.noted.append(f"{event} {os.fsdecode(path)}"[:200])


@dataclass
class Case:
    """One case; `originals` keeps what the unchanged files hold."""

    kind: Kind
    words: str  # what its random numbers depend on
    template: Path
    here: Path
    originals: dict[str, Any]
    log: str

    def outcome(self, number: int) -> Outcome:
        random = Random(self.words)
        files = sorted(self.template.glob(self.kind.files))
        target = random.choice(files).relative_to(self.template)
        if str(target) not in self.originals:
            self.originals[str(target)] = self._read(self._fresh(), target)
        folder = self._fresh()
        how = _changed(self.kind, folder / target, random)
        before, memory = self._listing(), _memory(reset=True)
        start, (result, reason) = time.process_time(), self._result(folder, target)
        milliseconds, megabytes = 1000 * (time.process_time() - start), _memory() - memory
        written = self._listing() - before
        if result != "refused":
            written = {name for name in written if not name.startswith("files/out")}  # of an import
        problem = reason if result == "failed" else self._problem(written, milliseconds, megabytes)
        if problem:
            result, reason = "failed", f"{how}: {problem}"
        return Outcome(number, result, f"{target} {reason}", milliseconds, megabytes)

    def _fresh(self) -> Path:
        """Return a new copy of the valid files, where programs run; its name is the same for all cases."""
        folder = self.here / "files"
        os.chdir(self.here)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.template, folder)
        os.chdir(folder)
        return folder

    def _read(self, folder: Path, target: Path) -> Any:
        return self.kind.read(folder, folder / target)

    def _result(self, folder: Path, target: Path) -> tuple[str, str]:
        _Watch.noted.clear()
        try:
            value = self._read(folder, target)
        except UserError as error:
            message = str(error)
            named = target.name in message or str(folder) in message or re.search(self.kind.named, message)
            if "\n" in message or len(message) > LONGEST or not named:
                return "failed", f"a message that does not name the file, or is too long: {message[:300]}"
            return "refused", message
        except BaseException as error:  # whatever it is, it is no UserError
            place = traceback.extract_tb(error.__traceback__)[-3:]
            where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(place))
            return "failed", f"{type(error).__name__}: {str(error)[:200]} ({where})"
        original = self.originals[str(target)]
        if digest(value) == digest(original):
            return "same", ""
        if self.kind.allowed(original, value, folder / target):
            return "other", ""
        return "failed", "another value than was written"

    def _problem(self, written: set[str], milliseconds: float, megabytes: float) -> str:
        """Return what else went wrong, or nothing."""
        if _Watch.noted:
            return f"it did {_Watch.noted[0]}"
        if left := written - {"files/out"}:
            return f"it wrote {sorted(left)}"
        if milliseconds > 1000 * SECONDS or megabytes > MEGABYTES:
            return f"it took {milliseconds:.0f} ms and {megabytes:.0f} MB"
        if "Traceback" in Path(self.log).read_text(errors="replace"):
            return f"a traceback on stderr, see {self.log}"
        return ""

    def _listing(self) -> set[str]:
        return {str(path.relative_to(self.here)) for path in self.here.rglob("*")}


def _changed(kind: Kind, path: Path, random: Random) -> str:
    """Change a file, and return how."""
    if random.random() < 0.08:
        place = random.choice([place for place in PLACES if not (kind.pipes and place is pipe)])
        place(path)
        return place.__name__
    data = path.read_bytes()
    for _ in range(20):
        table = kind.mutations if kind.mutations and random.random() < 0.5 else BYTES
        mutation = random.choice(table)
        try:
            changed = mutation(data, random)
        except (ValueError, LookupError, OverflowError):  # a format that this file, such as an empty one, has not
            continue
        if changed != data:
            path.write_bytes(changed)
            return mutation.__name__
    raise AssertionError(f"no mutation changes {path}")


def _memory(reset: bool = False) -> float:
    """Return the most memory that this process has had since the last reset, in MB."""
    if reset:
        with contextlib.suppress(OSError):  # a kernel without it shows the most so far
            Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
