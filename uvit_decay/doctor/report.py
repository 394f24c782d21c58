"""The run that is checked, findings of one line each, and the report of all findings."""

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
class Plan:
    """A run before it starts: what the doctor looks at.

    Args:
        trainer: the trainer of `fit`; it trains nothing here.
        task: the task; its settings are all flags.
        data: the data module, whose sets may not be loaded yet.
    """

    trainer: Trainer
    task: Task
    data: ImageData

    @property
    def begun(self) -> int:
        """Step of the checkpoint from which it resumes; 0 for a new run."""
        if self.task.start is None:
            return 0
        return self.task.start.step

    @property
    def periodic(self) -> list[Periodic]:
        """The callbacks that evaluate."""
        return [callback for callback in self.trainer.callbacks if isinstance(callback, Periodic)]


@dataclass(frozen=True)
class Finding:
    """Result of a check, in one line.

    Args:
        level: `error` if the run would fail, hang or lose something; `warning` if it is probably a mistake.
        subject: one or two words.
        text: the result, with figures.
        flag: the flag or variable that solves the problem; empty if there is no problem.
    """

    level: Level
    subject: str
    text: str
    flag: str = ""

    def __str__(self) -> str:
        line = f"{self.level:{WIDTH}}{self.subject}: {self.advice}"
        return " ".join(line.splitlines())

    @property
    def advice(self) -> str:
        """The text, and the flag if there is one."""
        return f"{self.text}; {self.flag}" if self.flag else self.text


class Report:
    """Findings in the order of the checks; each is printed at once.

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
        """Print the last line; return the exit code: 2 if there is an error, otherwise 0."""
        if self.show:
            counts = []
            for level in ("error", "warning"):
                count = sum(found.level == level for found in self.findings)
                counts.append(f"{count} {level}{'s' * (count != 1)}")
            print(", ".join(counts))
        elif self.errors:
            print(f"error: {self.errors[0].advice}", file=sys.stderr)  # in the log of this rank
        return 2 if self.errors else 0


def gib(size: float) -> str:
    """Return a number of bytes in GiB, or in MiB if it is smaller, such as 1.5 GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Return a time in hours, minutes and seconds, such as 0:07:06."""
    return str(timedelta(seconds=round(seconds)))
