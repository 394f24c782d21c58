"""Run cases in a forked process with limits: what a changed file leads to, and what it costs.

A case is a kind of file, a seed and a number; they determine the file that is changed and how. It ends well if what was
written is read, or what its kind allows, or if a UserError of one line names the file. It fails with any other
exception, another value, a process or a network connection that is started, more time or memory than the bounds, and
when its process dies or never answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from bytewise import BYTES, PLACES, Mutation
from torch import Tensor, nn

from uvit_decay.terminal.errors import LONGEST, UserError

SECONDS, MEGABYTES = 5.0, 500.0  # of CPU time, and above the memory at the start
PATIENCE = 60.0  # seconds of the clock after which a case counts as one that never ends
ADDRESSES = 2**33  # bytes of addresses that a process may have beyond those at its start
STARTED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pty.spawn")
CONNECTED = ("socket.connect", "socket.getaddrinfo", "socket.bind")


class Sources(NamedTuple):
    """Files that the makers start from: a training checkpoint, a folder of latents."""

    trained: Path
    encoded: Path


Reader = Callable[[Path, Path], Any]  # the folder of a case, and the file in it that was changed


def nothing_else(before: Any, after: Any) -> bool:
    """Allow no value but the one that was written: the kind has checksums of all that it means."""
    return False


def anything_valid(before: Any, after: Any) -> bool:
    """Allow every value that the reader takes: the kind has no checksums, an edited file is another file."""
    return True


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        make: write small valid files into a folder.
        read: read them by the public entry that commands use; raise a UserError for what is refused.
        files: glob of the files to change.
        mutations: those that know the format; may be empty.
        allowed: whether another value than the original's may be read.
    """

    make: Callable[[Path, Sources], None]
    read: Reader
    files: str
    mutations: tuple[Mutation, ...]
    allowed: Callable[[Any, Any], bool] = nothing_else


def run(kind: Kind, name: str, template: Path, seed: int, count: int) -> list[str]:
    """Run cases and return what went wrong; a process that dies or hangs fails its case, and another goes on."""
    waiting, failures, context = [*range(count)], [], get_context("fork")
    while waiting:
        parent, child = context.Pipe()
        process = context.Process(target=_cases, args=(kind, f"{name} {seed}", template, waiting, child), daemon=True)
        process.start()
        child.close()
        with contextlib.suppress(EOFError):
            while waiting and parent.poll(PATIENCE):
                problem = parent.recv()
                number = waiting.pop(0)
                failures += [f"{name} {number}: {problem}"] if problem else []
        process.kill()
        process.join()
        if waiting:
            failures.append(f"{name} {waiting.pop(0)}: no answer, or a process that died ({process.exitcode})")
    return failures


def _cases(kind: Kind, words: str, template: Path, numbers: list[int], connection: Connection) -> None:
    """Run cases in this process, which is a fork with limits, and send what went wrong in each."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, used + ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cases = _Cases(kind, template)
    for number in numbers:
        connection.send(cases.problem(Random(f"{words} {number}")))
    connection.close()
    os._exit(0)


class _Cases:
    """The cases of a process, in a folder beside the valid files of `template`."""

    def __init__(self, kind: Kind, template: Path) -> None:
        self.kind, self.template = kind, template
        self.here = template.parent / f"case{os.getpid()}"
        (self.here / "out").mkdir(parents=True)
        self.log = self.here.with_suffix(".log")
        sys.stdout = sys.stderr = self.log.open("w")
        for stream in (1, 2):
            os.dup2(sys.stdout.fileno(), stream)
        self.started: list[str] = []
        sys.addaudithook(self._watch)
        self.originals: dict[Path, Any] = {}  # what the unchanged files hold

    def _watch(self, event: str, args: tuple) -> None:
        """Note processes and connections that are started."""
        if event in STARTED + CONNECTED:
            self.started.append(f"{event} {args!r}"[:200])

    def problem(self, random: Random) -> str:
        """Change a file, read it, and return what went wrong, or nothing."""
        target = random.choice(sorted(self.template.glob(self.kind.files))).relative_to(self.template)
        if target not in self.originals:
            folder = self._fresh()
            self.originals[target] = self.kind.read(folder, folder / target)
        folder = self._fresh()
        how = _changed(self.kind, folder / target, random)
        memory = _memory(reset=True)
        self.started.clear()
        start = time.process_time()
        problems = [self._read(folder, target)]
        seconds, megabytes = time.process_time() - start, _memory() - memory
        problems += self.started[:1]
        if seconds > SECONDS or megabytes > MEGABYTES:
            problems.append(f"it took {seconds:.1f} s and {megabytes:.0f} MB")
        if "Traceback" in self.log.read_text(errors="replace"):
            problems.append(f"a traceback on stderr, see {self.log}")
        found = "; ".join(filter(None, problems))
        return f"{target}, {how}: {found}" if found else ""

    def _fresh(self) -> Path:
        """Return a new copy of the valid files, where programs run; its name is the same for all cases."""
        folder = self.here / "files"
        os.chdir(self.here)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.template, folder)
        os.chdir(folder)
        return folder

    def _read(self, folder: Path, target: Path) -> str:
        """Read the changed file; return what went wrong, or nothing."""
        try:
            value = self.kind.read(folder, folder / target)
        except UserError as error:
            message = str(error)
            named = target.name in message or str(folder) in message
            if "\n" in message or len(message) > LONGEST or not named:
                return f"a message that does not name the file, or is too long: {message[:300]}"
            return ""
        except BaseException as error:  # whatever it is, it is no UserError
            place = traceback.extract_tb(error.__traceback__)[-3:]
            where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(place))
            return f"{type(error).__name__}: {str(error)[:200]} ({where})"
        original = self.originals[target]
        same = digest(value) == digest(original) or self.kind.allowed(original, value)
        return "" if same else "another value than was written"


def _changed(kind: Kind, path: Path, random: Random) -> str:
    """Change a file, and return how."""
    if random.random() < 0.08:
        place = random.choice(PLACES)
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


def digest(value: Any) -> str:
    """Return a fingerprint of tensors, arrays, dataclasses and plain values inside one another."""
    total = hashlib.sha256()
    _feed(total.update, value)
    return total.hexdigest()


def _feed(update: Callable[[bytes], Any], value: Any) -> None:
    if isinstance(value, nn.Module):
        value = dict(value.state_dict())
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Tensor):
        value = value.detach().float().numpy() if value.is_floating_point() else value.numpy()
    if isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        update(f"dict of {len(value)}".encode())
        for key in sorted(value, key=repr):
            update(repr(key).encode())
            _feed(update, value[key])
    elif isinstance(value, list | tuple):
        update(f"list of {len(value)}".encode())
        for item in value:
            _feed(update, item)
    else:
        update(repr(value).encode(errors="surrogatepass"))
