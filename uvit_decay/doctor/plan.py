"""The run that is checked: what train.py would train, and how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.callbacks.resumption import runs_of
from uvit_decay.data import ImageData
from uvit_decay.tasks import Task


@dataclass(frozen=True)
class Run:
    """A run before it starts.

    Args:
        trainer: as `fit` would use it; it trains nothing here.
        task: the task.
        data: the data module, whose sets may not be loaded yet.
        settings: all flags, by name.
        begun: steps of the checkpoint from which it resumes.
    """

    trainer: Trainer
    task: Task
    data: ImageData
    settings: Mapping[str, Any]
    begun: int = 0

    @property
    def periodic(self) -> list[Periodic]:
        """The callbacks that evaluate."""
        return [callback for callback in self.trainer.callbacks if isinstance(callback, Periodic)]

    @property
    def folder(self) -> Path:
        """The folder in which the loggers make that of the run."""
        return runs_of(self.trainer.loggers, self.trainer.default_root_dir)[0]


def gib(size: float) -> str:
    """Return a number of bytes in words."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Return a time in words: 3.2 s, 12 min, 5.5 h, 3.1 days."""
    for size, unit in ((86400 * 2, "days"), (7200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
