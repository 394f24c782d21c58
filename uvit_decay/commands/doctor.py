"""`train.py doctor`: the command line of `fit`, which checks the run instead of training it; the order of checks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from uvit_decay.commands.train.launch import Launch
from uvit_decay.doctor import Finding, Plan, Report, cost
from uvit_decay.doctor.environment import check_devices, check_weights, list_images, list_ranks, list_versions
from uvit_decay.doctor.rehearsal import Measurements, Practice, Rehearsal, rehearse
from uvit_decay.runtime.distributed import others_needed
from uvit_decay.terminal.errors import UserError, one_line, with_flags
from uvit_decay.terminal.progress import track

STARTED = "UVIT_DECAY_DOCTOR"  # set for the processes that Lightning starts: only the first one reports


class Doctor(Launch):
    """LightningCLI that parses the flags of `fit`, builds its objects, and prints findings instead of training."""

    writes = False

    def subcommands(self) -> dict[str, set[str]]:
        """Return `fit`, whose flags the doctor takes."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        """Parse the arguments as `fit` does; Lightning starts further processes with the original ones."""
        super().parse_arguments(parser, ["fit", *args[1:]])

    def fit(self, model: LightningModule, datamodule: LightningDataModule, **_: Any) -> None:
        """Examine the run; LightningCLI calls this instead of the trainer's method."""
        report = Report(show=self.trainer.local_rank == self.trainer.node_rank == 0)
        with TemporaryDirectory() as folder, track(shown=report.show):

            def practice(callbacks: list[Callback]) -> Trainer:
                length = {"max_steps": self.trainer.max_steps, "max_epochs": self.trainer.max_epochs}
                return self.build_practice(**length, default_root_dir=folder, callbacks=callbacks)

            examine(Plan(self.trainer, model, datamodule), report, practice, self.measured)
        if dist.is_initialized() and not report.errors:
            dist.barrier()  # a process that is faster would take the group from the others
        code = report.close()
        if code:
            sys.exit(code)


def examine(run: Plan, report: Report, practice: Practice, measured: Measurements | None) -> None:
    """Add all findings on a run to the report: what this process can see, then a rehearsal of all ranks.

    Args:
        run: the run.
        report: the report.
        practice: builds the trainer of the rehearsal.
        measured: what a rehearsal for the length of the run has measured; None: there was none.
    """
    if STARTED in os.environ:
        rehearse(run, practice, Rehearsal(run))
        return
    for check in (list_versions, check_devices, list_ranks):
        report.add(check(run))
    if report.errors:
        return  # there are not as many processes as the flags ask for
    try:
        run.data.load()
        for check in (list_images, check_weights):
            report.add(check(run))
    except UserError as error:
        report.add([Finding("error", "data", with_flags(error))])
    if report.errors and run.trainer.world_size == 1:
        return
    try:
        with others_needed(), track("rehearsal", shown=report.show):
            report.add(_measure_cost(run, practice, bool(report.errors), measured))
    except torch.OutOfMemoryError as error:
        flags = "--data.device_batch_size, or --model.net.checkpointing true"
        report.add([Finding("error", "memory", one_line(error), flags)])
    except UserError as error:
        if not report.errors:
            report.add([Finding("error", "run", with_flags(error))])


def _measure_cost(run: Plan, practice: Practice, failed: bool, measured: Measurements | None) -> Iterator[Finding]:
    """Rehearse the run unless that was done, and yield the findings on its time and memory.

    `failed`: this process has found an error; the other arguments are as of `examine`.
    """
    found = measured
    if found is None:
        os.environ[STARTED] = "yes"
        try:
            found = rehearse(run, practice, Rehearsal(run, failed))
        finally:
            del os.environ[STARTED]
    yield from found.callbacks
    for check in cost.CHECKS:
        yield from check(run, found)
