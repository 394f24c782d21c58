"""A process that has imported the whole package and forks a program for every line of JSON on its standard input.

A start costs a fork, not the six seconds of the imports; the program is a process of its own in all else: it has its
own session, signals, limits, environment and files, and runs a real script of the project. It ends as the interpreter
does, except that it does not take apart all those imports, which would take 1.5 s.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
END = {"code": 0}
PR_SET_PDEATHSIG = 1  # of prctl(2)
OTHERS = ("torch.distributed.nn.functional", "lightning.pytorch.cli", "torchmetrics", "diffusers.models", "PIL.Image")
OTHERS += ("torch.utils.benchmark", "torch.utils.tensorboard", "sklearn.datasets", "matplotlib.backends.backend_agg")
STEP = "Task.optimizer_step"  # its calls are counted as the steps that the program did


def import_all() -> None:
    """Import the package as its programs do, except for the modules that are programs."""
    import uvit_decay

    names = [module.name for module in pkgutil.walk_packages(uvit_decay.__path__, "uvit_decay.")]
    for name in (*OTHERS, *names):
        if not name.endswith("__main__"):
            importlib.import_module(name)


def serve() -> dict[str, Any] | None:
    """Fork a program for each line; return its order within the program, and None in this process at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the waiters
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            end_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if order["inside"]:
                enter(order["inside"])
            pid = os.fork()
            if pid == 0:
                end_with_parent()
                return order
            _wait(pid, Path(order["folder"]))
    return None


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, so that the suite leaves no process behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(pid: int, folder: Path) -> None:
    """Write the process id of the program and, when it has ended, its exit code; end this process."""
    _write(folder / "pid", str(pid))
    _, status = os.waitpid(pid, 0)
    _write(folder / "returncode", str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def become(order: dict[str, Any]) -> None:
    """Run the program of an order; its output goes to files in the order's folder."""
    import torch

    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(order["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    # Torch replaces its pool of threads when it is first asked for after a fork, and aborts ("Invalid thread pool!") if
    # two threads ask at once, as the main one and autograd's do in a training step.
    torch.set_num_threads(torch.get_num_threads())
    script, *args = order["argv"]
    if script == "-m":
        script, *args = args
        sys.argv = [script, *args]
        run = runpy.run_module
    else:
        sys.argv = [str(ROOT / script), *args]
        run = runpy.run_path
    if order["trap"]:
        trap = Trap(**order["trap"], folder=Path(order["folder"]))
        if "train.py" in order["argv"]:
            trap.set_when_training_begins()
        else:
            trap.set()
    try:
        run(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        END["code"] = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    except BaseException as error:
        END["code"] = 130 if isinstance(error, KeyboardInterrupt) else 1
        raise


class Trap:
    """Counts the Python and C calls within some functions, or sends a signal to this process at one of them.

    Args:
        functions: qualified names, such as "LastCheckpoint._save".
        folder: where `calls.json` tells at the end {function: [calls within its first run, its second, ...]}, and
            `steps` tells the optimizer steps that were begun before the signal.
        number: the signal; None counts only.
        entry: the run of the first of `functions` in which the signal comes, from 0.
        call: the call within that run at which it comes, from 0.
    """

    def __init__(
        self, functions: Sequence[str], folder: Path, number: int | None = None, entry: int = 0, call: int = 0
    ) -> None:
        self.functions, self.folder, self.number = frozenset(functions), folder, number
        self.place = functions[0], entry, call
        self.entered: dict[FrameType, tuple[str, int]] = {}  # functions that run now
        self.calls: dict[str, list[int]] = {name: [] for name in functions}
        self.seen: Counter[str] = Counter()

    def set(self) -> None:
        """Begin to count in this thread."""
        if self.number is None:
            atexit.register(self._tell)
        sys.setprofile(self._event)

    def set_when_training_begins(self) -> None:
        """Begin to count when the trainer runs: none of `functions` is called before, and counting costs seconds."""
        from lightning.pytorch import Trainer

        run_trainer = Trainer._run

        def set_and_run(trainer: Trainer, *args: Any, **options: Any) -> Any:
            self.set()
            return run_trainer(trainer, *args, **options)

        Trainer._run = set_and_run

    def _event(self, frame: FrameType, kind: str, _: Any) -> None:
        if kind == "call":
            name = frame.f_code.co_qualname
            if name == STEP:
                self.seen[STEP] += 1
            if name in self.functions:
                self.entered[frame] = name, len(self.calls[name])
                self.calls[name].append(0)
        if kind in ("call", "c_call"):
            for name, entry in self.entered.values():
                if self.number is not None and (name, entry, self.calls[name][entry]) == self.place:
                    self._strike()
                self.calls[name][entry] += 1
        elif kind == "return":
            self.entered.pop(frame, None)

    def _strike(self) -> None:
        sys.setprofile(None)
        (self.folder / "steps").write_text(str(self.seen[STEP]))
        os.kill(os.getpid(), self.number)

    def _tell(self) -> None:
        sys.setprofile(None)
        (self.folder / "calls.json").write_text(json.dumps(self.calls))


def enter(pid: int) -> None:
    """Start the next process on another process's node, in its namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "pid", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")


def leave() -> None:
    """End this process, as the last exit handler, after the program's handlers and the wait for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(END["code"])


if __name__ == "__main__":
    atexit.register(leave)  # before all imports: the last registered one runs first
    sys.path[0] = str(ROOT)
    import torch

    torch.set_num_threads(1)
    import_all()
    gc.freeze()  # collections in the programs need not walk the imports
    mine = serve()
    if mine is not None:
        become(mine)
