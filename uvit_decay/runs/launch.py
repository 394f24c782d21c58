"""A launch: a start of train.py in a run folder, which writes config.yaml and a line of launches.jsonl.

{"time": "2026-11-26T18:33:10+00:00", "step": 500, "parent": null, "changes": {"trainer.max_steps": [500, 1000]},
"versions": {"torch": "2.15.0", ...}, "machine": {"host": "node1", "device": "cpu", "processes": 1},
"loggers": {"RunLogger": 0}}
"""

from __future__ import annotations

import json
import platform
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import SaveConfigCallback

from uvit_decay.files.validation import as_type, parse, read_text
from uvit_decay.files.writing import claim_paths, replacing
from uvit_decay.runs.folder import LAUNCHES, RUN_FILES, remove_partial_checkpoints, run_folder
from uvit_decay.runs.history import CHECKPOINTS, CONFIG
from uvit_decay.runs.loggers import continue_records, guard, list_versions
from uvit_decay.runs.resumable import Resumable, Start
from uvit_decay.runs.settings import compare_settings
from uvit_decay.terminal.errors import UserError

LARGEST = 2**26  # maximum bytes of launches.jsonl


@dataclass(frozen=True)
class LaunchRecord:
    """A start of train.py in a run folder.

    Args:
        time: when it began, in UTC.
        step: the optimizer step from which it trains.
        parent: the checkpoint of another run, or the file of --model.init_from, from which it starts; None for a run
            that starts from scratch or goes on in its folder.
        changes: settings that differ from the checkpoint, by flag: its value and the new one.
        versions: versions of Python and of the libraries that decide what is computed.
        machine: host, device and number of processes.
        loggers: where each logger keeps this run, see `list_versions`.
    """

    time: str
    step: int
    parent: str | None
    changes: dict[str, object]
    versions: dict[str, str]
    machine: dict[str, object]
    loggers: dict[str, object]


def read_launches(run: Path) -> list[LaunchRecord]:
    """Return the launches of a run folder, the oldest first; none if a script wrote it."""
    path = run / LAUNCHES
    if not path.exists():
        return []
    launches = []
    for number, line in enumerate(read_text(path, LARGEST).splitlines(), 1):
        where = f"{path}, line {number}"
        launches.append(as_type(LaunchRecord, parse(line, where), where))
    return launches


def describe_launch(trainer: Trainer, task: Resumable) -> LaunchRecord:
    """Describe this launch; only rank 0 may call this."""
    start: Start | None = task.start
    step = 0
    parent = task.settings.get("model.init_from")
    changes: dict[str, object] = {}
    if start is not None:
        step = start.step
        parent = None if start.run else str(start.checkpoint)
        for change in compare_settings(start.settings, task.settings):
            changes[change.name] = [change.before, change.now]
    versions = {"python": platform.python_version()}
    for name in ("uvit_decay", "torch", "lightning"):
        with suppress(PackageNotFoundError):  # uvit_decay runs from a checkout, too
            versions[name] = version(name)
    device = trainer.strategy.root_device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    machine = {"host": platform.node(), "device": kind, "processes": trainer.world_size}
    time = datetime.now(UTC).isoformat(timespec="seconds")
    return LaunchRecord(time, step, parent, changes, versions, machine, dict(list_versions(trainer.loggers)))


def go_on(trainer: Trainer, start: Start) -> None:
    """Let the loggers continue the records of the run that goes on; all ranks must call this before the fit."""
    launches = read_launches(start.run)
    versions = launches[-1].loggers if launches else {}
    continue_records(trainer.loggers, start.run, versions, start.step)


class SaveConfig(SaveConfigCallback):
    """Opens the run folder and writes config.yaml and launches.jsonl there; it also guards the loggers.

    A training writes them when its checkpoint is restored: one that is refused leaves the folder of its run as it was.
    The folder of a new run must not hold another one; it is locked until the program ends. A logger that fails during
    the run is reported once and does not end the run, see `guard`.
    """

    def __init__(self, *args: Any, claims: ExitStack, **options: Any) -> None:
        super().__init__(*args, **options)
        self._claims = claims  # the locks of this program

    def setup(self, trainer: Trainer, task: Resumable, stage: str) -> None:
        if self.already_saved:
            return
        for logger in trainer.loggers:
            guard(logger)
        self._folder = run_folder(trainer)
        if task.start is None or task.start.run is None:
            self._take_new_folder(trainer)
        if stage != "fit":
            super().setup(trainer, task, stage)

    def on_fit_start(self, trainer: Trainer, task: Resumable) -> None:
        super().setup(trainer, task, "fit")

    def _take_new_folder(self, trainer: Trainer) -> None:
        """Lock the run folder; raise a UserError if it holds a run. All ranks must call this.

        What killed runs of the same experiment have left is removed, because this run may have been such a run.
        """
        occupied = False
        if trainer.is_global_zero:
            remove_partial_checkpoints(self._folder.parent)
            self._claims.enter_context(claim_paths(self._folder))
            occupied = any((self._folder / name).exists() for name in (CHECKPOINTS, *RUN_FILES))
        if trainer.strategy.broadcast(occupied):
            raise UserError(f"{self._folder} already holds a run: set another version or folder of the logger")

    def save_config(self, trainer: Trainer, task: Resumable, stage: str) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(task.settings)
        with replacing(self._folder / CONFIG) as file:
            self.parser.save(self.config, file.name, skip_unset=False, overwrite=True)
        if stage == "fit":
            launches = [*read_launches(self._folder), describe_launch(trainer, task)]
            with replacing(self._folder / LAUNCHES) as file:  # a killed run leaves it complete
                for launch in launches:
                    file.write(f"{json.dumps(asdict(launch))}\n".encode())
