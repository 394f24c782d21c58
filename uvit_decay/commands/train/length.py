"""The length of a run in minutes: how many steps fit is measured before step 0, on weights that are not kept."""

from __future__ import annotations

import logging
import shlex
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.doctor import Plan
from uvit_decay.doctor.rehearsal import FORWARD, MOST, PRACTICE, Rehearsal, copy_for_practice, rehearse
from uvit_decay.doctor.report import duration
from uvit_decay.tasks import Task
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.program import localise
from uvit_decay.terminal.progress import track

MEASURING = 0.05  # share of the time that the measurement may take
RESERVE = 0.03  # share of the time for checkpoints, pictures and the end of the program
CKPT_PATH = "--ckpt_path"
FAR = 10**9  # steps of the trainer that measures; a schedule needs an end
BuildTrainer = Callable[..., Trainer]  # function settings -> trainer of the run with other settings


class Pace(Rehearsal):
    """Rehearsal that finds the number of steps that fit into the time that is left.

    What callbacks make once for a run, such as a trained classifier, is made here, so that its time is known.

    Args:
        run: the run.
        minutes: length of the run, from the start of the program.
        began: when the program began, by `time.monotonic()`.
    """

    def __init__(self, run: Plan, minutes: float, began: float) -> None:
        super().__init__(run, most=min(MOST, MEASURING * 60 * minutes))
        self.minutes = minutes
        self.end = began + 60 * minutes * (1 - RESERVE)
        self.steps = 0  # that fit
        self.evaluating = 0.0  # seconds of the evaluations of such a run
        self._costs: dict[Periodic, float] = {}  # seconds of one evaluation, by callback

    @property
    def left(self) -> float:
        """Seconds until the end of the run."""
        return self.end - time.monotonic()

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        super().on_train_end(trainer, task)
        for finding in self.found.callbacks:
            if finding.level == "error":  # with which the run would end
                raise UserError(finding.text)
        per_evaluation = FORWARD * self.found.step / trainer.datamodule.batch_size
        for callback in self.run.periodic:
            if callback.left_out is None:
                callback.prepare_once(trainer, task)
                self._costs[callback] = callback.evaluations(trainer, task) * per_evaluation
        left = self.left

        def seconds(steps: int) -> float:
            return steps * self.found.step + self._estimate_evaluations(steps)

        most = max(0, int(left / self.found.step))
        fitting = bisect_right(range(1, most + 1), left, key=seconds)
        if not fitting:
            least = (60 * self.minutes - left + seconds(1)) / 60
            raise UserError(
                f"--minutes {self.minutes:g} leaves no time for training: reading and evaluation take about "
                f"{least:.1f}; give more, or set --trainer.max_steps"
            )
        self.steps = round_down(fitting)
        self.evaluating = self._estimate_evaluations(self.steps)

    def _estimate_evaluations(self, steps: int) -> float:
        """Return the seconds of all evaluations of the next `steps` steps of a run."""
        self.found.total = self.run.begun + steps
        total = 0.0
        for callback, seconds in self._costs.items():
            total += self._count_times(callback) * seconds
        return total


def round_down(steps: int) -> int:
    """Return a number of steps rounded down to two digits: 1,437 becomes 1,400."""
    unit = 10 ** max(0, len(str(steps)) - 2)
    return steps // unit * unit


def find_steps(minutes: float, began: float, run: Plan, build_trainer: BuildTrainer) -> int:
    """Return how many steps of a run fit into its minutes, and print it; the run itself is not changed.

    Its images are loaded, and stay loaded.

    Args:
        minutes: length of the run from the start of the program, with reading, previews and evaluation.
        began: when the program began, by `time.monotonic()`.
        run: the run, before its trainer has begun.
        build_trainer: returns the run's trainer with other settings.
    """
    if run.trainer.world_size > 1:
        raise UserError(f"--minutes {minutes:g} is for one process: set --trainer.max_steps, the length of the run")
    trial = copy_for_practice(run.task)
    trial.init_from = None
    pace = Pace(Plan(run.trainer, trial, run.data), minutes, began)
    if run.data.train is None:
        run.data.load()
    with TemporaryDirectory() as folder, isolate_rng(), _silent(), track("measuring the speed"):

        def practice(callbacks: list[Any]) -> Trainer:
            return build_trainer(**PRACTICE, max_steps=FAR, default_root_dir=folder, callbacks=callbacks)

        rehearse(pace.run, practice, pace)
    training = pace.steps * pace.found.step
    speed = f"{duration(training)} at {1 / pace.found.step:.2g} steps per second"
    rank_zero_info(f"--trainer.max_steps {pace.steps}: {speed}, and {duration(pace.evaluating)} of evaluation")
    return pace.steps


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress messages about the run, which come again when it begins."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def describe_longer(words: Sequence[str], steps: int, checkpoint: str | Path | None) -> str:
    """Return the command that trains a run up to `steps`.

    Args:
        words: the command line of the run.
        steps: number of optimizer steps.
        checkpoint: file or name of the checkpoint to resume from; None: the command starts a new run.
    """
    kept = []
    skips_value = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if not skips_value and flag != CKPT_PATH:
            kept.append(word)
        skips_value = flag == CKPT_PATH and not equals
    if checkpoint is not None:
        kept += [CKPT_PATH, str(checkpoint)]
    command = shlex.join([*kept, "--trainer.max_steps", str(steps)])
    return f"{localise('python train.py')} {command}"
