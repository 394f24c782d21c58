"""The run that is checked, findings on it, one line each, and the report that they make."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lightning.pytorch import Trainer

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.data import ImageData
from uvit_decay.tasks import Task

Level = Literal["ok", "note", "warning", "error"]
WIDTH = len("warning") + 2


@dataclass(frozen=True)
class Run:
    """A run before it starts.

    Args:
        trainer: as `fit` would use it; it trains nothing here.
        task: the task, which knows all flags as its settings.
        data: the data module, whose sets may not be loaded yet.
    """

    trainer: Trainer
    task: Task
    data: ImageData

    @property
    def begun(self) -> int:
        """Step of the checkpoint from which it resumes, 0 of a new run."""
        return self.task.start[1] if self.task.start else 0

    @property
    def periodic(self) -> list[Periodic]:
        """The callbacks that evaluate."""
        return [callback for callback in self.trainer.callbacks if isinstance(callback, Periodic)]


@dataclass(frozen=True)
class Finding:
    """Result of a check, in one line.

    Args:
        level: `error` if the run would fail, hang or lose something; `warning` if it probably is not what is meant.
        subject: one or two words.
        text: what it is, with figures.
        flag: the flag or variable that mends it; empty if there is nothing to mend.
    """

    level: Level
    subject: str
    text: str
    flag: str = ""

    def __str__(self) -> str:
        line = f"{self.level:{WIDTH}}{self.subject}: {self.text}" + (f"; {self.flag}" if self.flag else "")
        return " ".join(line.splitlines())


class Report:
    """Findings in the order in which they were made, which are printed at once.

    Args:
        show: print them; only one process of a run does.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self.findings: list[Finding] = []

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings one by one, as they are made."""
        for finding in findings:
            self.findings.append(finding)
            if self.show:
                print(finding, flush=True)

    @property
    def errors(self) -> list[Finding]:
        """The findings that would stop the run."""
        return [finding for finding in self.findings if finding.level == "error"]

    def close(self) -> int:
        """Print the last line; return the exit code: 2 if there is an error, else 0."""
        if not self.show:
            for error in self.errors[:1]:  # in the log of this rank
                print(f"error: {error.text}" + (f"; {error.flag}" if error.flag else ""), file=sys.stderr)
        else:
            counts = [(sum(found.level == level for found in self.findings), level) for level in ("error", "warning")]
            print(", ".join(f"{count} {level}{'s' * (count != 1)}" for count, level in counts))
        return 2 if self.errors else 0


def gib(size: float) -> str:
    """Return a number of bytes in words."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Return a time in hours, minutes and seconds, such as 0:07:06."""
    return str(timedelta(seconds=round(seconds)))
