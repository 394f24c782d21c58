"""`train.py doctor`: the command line of `fit`, which checks the run instead of training it; the order of checks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.callbacks.resumption import AUTO, NAMES
from uvit_decay.commands.cli import CLI
from uvit_decay.doctor import Finding, Report, Run
from uvit_decay.doctor.cost import CHECKS
from uvit_decay.doctor.environment import devices, images, installed, ranks, weights
from uvit_decay.doctor.rehearsal import Practice, rehearse
from uvit_decay.runtime.distributed import others_needed
from uvit_decay.runtime.errors import RunEnded, UserError, one_line

COMMAND = "doctor"
STARTED = "UVIT_DECAY_DOCTOR"  # set for the processes that Lightning starts: only the first one reports
# What a rehearsal does without: it writes nothing, validates nothing, and ends when it has seen enough.
PRACTICE = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("num_sanity_val_steps", "limit_val_batches"), 0),
    **dict.fromkeys(("min_steps", "min_epochs", "max_time", "profiler"), None),
    "fast_dev_run": False,
}


class Doctor(CLI):
    """LightningCLI that parses the flags of `fit`, builds what they say, and prints findings in place of training."""

    begun = 0  # step of the checkpoint

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        """Parse the arguments as those of `fit`; Lightning starts further processes with the original ones."""
        super().parse_arguments(parser, ["fit", *args[1:]])

    def before_instantiate_classes(self) -> None:
        logging.disable(logging.WARNING)  # messages of a trainer that nobody will use
        self.report = Report(rank_zero_only.rank == 0)
        folders = _folders(self._get(self.config, "trainer"))
        self._missing = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
        super().before_instantiate_classes()

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except UserError as error:
            self._end(Finding("error", "configuration", str(error)))

    def before_fit(self) -> None:
        name = self.config.fit.ckpt_path
        try:
            super().before_fit()
            if name in NAMES:
                found = self.config_init.fit.ckpt_path
                text = f"it would resume from {found}" if found else "a new run, there is no checkpoint to resume from"
                self.report.add([Finding("ok", "start", f"--ckpt_path {name}: {text}")])
        except UserError as error:
            done = isinstance(error, RunEnded) and name == AUTO  # `fit` does nothing, and exits with 0
            self._end(Finding("note" if done else "error", "start", str(error)))

    def _resume(self) -> int | None:
        step = super()._resume()
        self.begun = step or 0
        return step

    def fit(self, model: LightningModule, datamodule: LightningDataModule, **_: Any) -> None:
        """Examine the run; LightningCLI calls this in place of the trainer's method."""
        self.save_config_callback = None
        with TemporaryDirectory() as folder:

            def practice(callbacks: list[Callback]) -> Trainer:
                return self.instantiate_trainer(**PRACTICE, default_root_dir=folder, callbacks=callbacks)

            examine(Run(self.trainer, model, datamodule, self.begun), self.report, practice)
        if dist.is_initialized() and not self.report.errors:
            dist.barrier()  # a process that is faster would take the group from the others
        if code := self._close():
            sys.exit(code)

    def _end(self, finding: Finding) -> NoReturn:
        """Close the report with this finding, without which nothing else can be checked, and exit."""
        self.report.add([finding])
        sys.exit(self._close())

    def _close(self) -> int:
        """Close the report, remove folders that the loggers have made, and return the exit code."""
        logging.disable(logging.NOTSET)
        for path in sorted(self._missing, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # not empty, or another rank was faster
                path.rmdir()
        code = self.report.close()
        sys.stdout.flush()
        return code


def _folders(trainer: Namespace) -> list[Path]:
    """Return the folders that a trainer of this configuration may make."""
    loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    given = [logger.get("init_args") or {} for logger in loggers if isinstance(logger, Namespace)]
    names = [(own.get("save_dir"), own.get("experiment") or own.get("name") or "") for own in given]
    return [Path(root, name).absolute() for root, name in [*names, (trainer.default_root_dir, "")] if root]


def examine(run: Run, report: Report, practice: Practice) -> None:
    """Add all findings on a run to the report: what this process can see, then a rehearsal of all ranks."""
    if STARTED in os.environ:
        rehearse(run, practice)
        return
    report.show &= run.trainer.local_rank == run.trainer.node_rank == 0
    for check in (installed, devices, ranks):
        report.add(check(run))
    if any(finding.subject == "devices" for finding in report.errors):
        return  # there are not as many processes as the flags ask for
    try:
        run.data.load()
        for check in (images, weights):
            report.add(check(run))
    except UserError as error:
        report.add([Finding("error", "data", str(error))])
    if report.errors and run.trainer.world_size == 1:
        return
    try:
        with others_needed():
            report.add(_cost(run, practice, bool(report.errors)))
    except torch.OutOfMemoryError as error:
        flags = "--data.device_batch_size, or --model.net.checkpointing true"
        report.add([Finding("error", "memory", one_line(error), flags)])
    except UserError as error:
        if not report.errors:
            report.add([Finding("error", "run", str(error))])


def _cost(run: Run, practice: Practice, failed: bool) -> Iterator[Finding]:
    os.environ[STARTED] = "yes"
    try:
        found = rehearse(run, practice, failed)
    finally:
        del os.environ[STARTED]
    for check in CHECKS:
        yield from check(run, found)
