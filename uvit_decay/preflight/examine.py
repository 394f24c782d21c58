"""The order of the checks: what this process can see, then what all ranks must have in common, then a rehearsal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace

from lightning.pytorch import Callback, Trainer

from uvit_decay.preflight import cost
from uvit_decay.preflight.environment import devices, images, installed
from uvit_decay.preflight.launch import launch
from uvit_decay.preflight.meeting import ANSWER, Meeting
from uvit_decay.preflight.nodes import STARTED, compare, data_facts
from uvit_decay.preflight.plan import Run
from uvit_decay.preflight.rehearsal import Measured, Rehearsal, rehearse, rehearsed
from uvit_decay.preflight.report import Finding, Report
from uvit_decay.preflight.space import disk, weights
from uvit_decay.runtime.errors import UserError

HERE = (installed, devices, launch)  # checks that need neither data nor other ranks
LOADED = (images, weights)  # checks that need the data
Practice = Callable[[list[Callback]], Trainer]  # makes a trainer that writes nothing


def examine(run: Run, report: Report, practice: Practice) -> None:
    """Add all findings on a run to the report.

    Args:
        run: the run.
        report: takes the findings; that of the first process is shown.
        practice: returns a trainer as that of the run, with these callbacks, that keeps nothing.
    """
    if STARTED in os.environ:  # Lightning has started this process for the rehearsal of another one
        _rehearsal(run, practice)
        return
    report.show &= run.trainer.local_rank == run.trainer.node_rank == 0
    for check in HERE:
        report.add(check(run))
    if any(finding.subject in ("ranks", "devices") for finding in report.errors):
        return  # the ranks would wait for one another
    try:
        with _meeting(run) as meeting:
            report.add(_together(run, meeting) if meeting else _alone(run))
            if not report.errors:
                for check in LOADED:
                    report.add(check(run))
            if not _anywhere(meeting, report, "local"):
                report.add(_cost(run, practice))
                _anywhere(meeting, report, "cost")
    except UserError as error:
        report.add([Finding("error", "run", str(error))])


def _meeting(run: Run) -> AbstractContextManager[Meeting | None]:
    """Return the meeting of the processes that exist, if there are several."""
    several = run.trainer.num_nodes > 1 or (run.launched_outside and run.trainer.num_devices > 1)
    return Meeting.of(run, ANSWER) if run.has_ranks and several else nullcontext()


def _together(run: Run, meeting: Meeting) -> Iterator[Finding]:
    seconds = meeting.all_reduce(run.trainer.strategy.root_device)
    yield Finding("ok", "all-reduce", f"{meeting.size} processes at {meeting.where} in {seconds:.2f} s")
    yield from compare(run, meeting)


def _alone(run: Run) -> Iterator[Finding]:
    if "error" in (facts := data_facts(run)):
        yield Finding("error", "data", facts["error"])


def _anywhere(meeting: Meeting | None, report: Report, name: str) -> bool:
    """Return whether any rank has an error; the report of rank 0 takes what only others have found."""
    if meeting is None:
        return bool(report.errors)
    mine = [asdict(finding) for finding in report.findings if finding.level in ("error", "warning")]
    found = meeting.agree(f"found {name}", mine, lambda findings: findings)
    known = {finding.text for finding in report.findings}
    for rank, findings in enumerate(found):
        others = [Finding(**finding) for finding in findings if finding["text"] not in known]
        known |= {finding.text for finding in others}
        report.add(replace(finding, text=f"rank {rank}: {finding.text}") for finding in others)
    return any(finding["level"] == "error" for findings in found for finding in findings)


def _cost(run: Run, practice: Practice) -> Iterator[Finding]:
    os.environ[STARTED] = "yes"  # for the processes that Lightning starts
    try:
        found = _rehearsal(run, practice)
    finally:
        del os.environ[STARTED]
    for check in cost.CHECKS:
        yield from check(run, found)
    yield from disk(run, found.total)


def _rehearsal(run: Run, practice: Practice) -> Measured:
    rehearsal = Rehearsal(run)
    return rehearse(run, practice([*rehearsed(run.trainer), rehearsal]), rehearsal)
