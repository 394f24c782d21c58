"""Moments of a program: the n-th call within a function. There a signal can strike it, at the same place each time."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

STEP = "Task.optimizer_step"  # its calls are counted as the steps that the program did


class Trap:
    """Counts the calls, Python's and C's, within some functions, or sends a signal to this process at one of them.

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
