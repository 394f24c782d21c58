"""The order of the checks: what this process can see, then a rehearsal of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from uvit_decay.doctor.cost import CHECKS
from uvit_decay.doctor.environment import devices, images, installed, ranks, weights
from uvit_decay.doctor.rehearsal import Practice, rehearse
from uvit_decay.doctor.report import Finding, Report, Run
from uvit_decay.runtime.distributed import others_needed
from uvit_decay.runtime.errors import UserError, one_line

STARTED = "UVIT_DECAY_DOCTOR"  # set for the processes that Lightning starts: only the first one reports


def examine(run: Run, report: Report, practice: Practice) -> None:
    """Add all findings on a run to the report.

    Args:
        run: the run.
        report: takes the findings; that of the first process is shown.
        practice: see `rehearse`.
    """
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
