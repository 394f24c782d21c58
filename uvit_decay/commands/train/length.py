"""The length of a run in minutes: how many steps fit is measured before step 0, on weights that are not kept."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from uvit_decay.doctor import Plan
from uvit_decay.doctor.cost import estimate_evaluations
from uvit_decay.doctor.rehearsal import MOST, Measurements, Rehearsal, copy_for_practice, rehearse
from uvit_decay.doctor.report import duration
from uvit_decay.tasks import Task
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.progress import track

MEASURING = 0.05  # share of the time that the measurement may take
RESERVE = 0.03  # share of the time for checkpoints, pictures and the end of the program
FAR = 10**9  # steps of the trainer that measures; a schedule needs an end
BuildTrainer = Callable[..., Trainer]  # function settings -> trainer of a rehearsal with these settings


class Pace(Rehearsal):
    """Rehearsal that also makes what callbacks make once for a run, such as a trained classifier: its time counts."""

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        super().on_train_end(trainer, task)
        for finding in self.found.callbacks:
            if finding.level == "error":  # with which the run would end
                raise UserError(finding.text)
        for callback in self.found.evaluations:
            callback.prepare_once(trainer, task)


def count_fitting(run: Plan, found: Measurements, left: float) -> int:
    """Return the number of steps that fit into `left` seconds with their evaluations; 0 if none fits.

    Args:
        run: the run.
        found: its measurements.
        left: seconds until the end of the run.
    """

    def seconds(steps: int) -> float:
        return steps * found.step + estimate_evaluations(run, replace(found, total=run.begun + steps))

    most = max(0, int(left / found.step))
    return bisect_right(range(1, most + 1), left, key=seconds)


def seconds_left(minutes: float, began: float) -> float:
    """Return the seconds until the end of a run of some minutes that began at this time of `time.monotonic()`."""
    return began + 60 * minutes * (1 - RESERVE) - time.monotonic()


def round_down(steps: int) -> int:
    """Return a number of steps rounded down to two digits: 1,437 becomes 1,400."""
    unit = 10 ** max(0, len(str(steps)) - 2)
    return steps // unit * unit


def find_steps(minutes: float, began: float, run: Plan, build_practice: BuildTrainer) -> Measurements:
    """Measure a run, find how many of its steps fit into its minutes, and print it; the run itself is not changed.

    Its images are loaded, and stay loaded.

    Args:
        minutes: length of the run from the start of the program, with reading, previews and evaluation.
        began: when the program began, by `time.monotonic()`.
        run: the run, before its trainer has begun.
        build_practice: returns the trainer of a rehearsal of the run, with other settings.

    Returns:
        The measurements, with the step at which the run ends as `total`.
    """
    if run.trainer.world_size > 1:
        raise UserError(f"--minutes {minutes:g} is for one process: set --trainer.max_steps, the length of the run")
    trial = copy_for_practice(run.task)
    trial.init_from = None
    plan = Plan(run.trainer, trial, run.data)
    if run.data.train is None:
        run.data.load()
    with TemporaryDirectory() as folder, isolate_rng(), _silent(), track("measuring the speed"):

        def practice(callbacks: list[Any]) -> Trainer:
            return build_practice(max_steps=FAR, default_root_dir=folder, callbacks=callbacks)

        found = rehearse(plan, practice, Pace(plan, most=min(MOST, MEASURING * 60 * minutes)))
    left = seconds_left(minutes, began)
    steps = round_down(count_fitting(run, found, left))
    found.total = run.begun + max(steps, 1)
    evaluating = estimate_evaluations(run, found)
    if not steps:
        least = minutes + (found.step + evaluating - left) / 60
        raise UserError(
            f"--minutes {minutes:g} leaves no time for training: reading and evaluation take about {least:.1f}; "
            "give more, or set --trainer.max_steps"
        )
    speed = f"{duration(steps * found.step)} at {1 / found.step:.2g} steps per second"
    rank_zero_info(f"--trainer.max_steps {steps}: {speed}, and {duration(evaluating)} of evaluation")
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress messages about the run, which come again when it begins."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
