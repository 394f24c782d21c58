"""Settings that do not fit the length of the run: a warm-up that it never leaves, an average that it never forms."""

from __future__ import annotations

import math
from collections.abc import Iterator

from uvit_decay.callbacks.ema import EMA
from uvit_decay.doctor.rehearsal import Measurements
from uvit_decay.doctor.report import Finding, Plan
from uvit_decay.runs.averages import MOST_INITIAL, describe_initial_share, initial_share

FORGOTTEN = 0.01  # share of the initial weights at the end of the run with the decay that is recommended


def check_warmup(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Warn if the run ends within its warm-up."""
    optim = run.task.optim
    shorter = optim.find_shorter_warmup(found.total, found.epoch)
    if shorter is not None:
        text = f"the run ends at step {found.total:g}, its warm-up takes {optim.warmup(found.epoch):g} steps"
        yield Finding("warning", "warm-up", text, shorter)


def check_average(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Warn if the average of the weights, from which samples and probes come, keeps much of the initial weights."""
    for callback in run.trainer.callbacks:
        if not isinstance(callback, EMA) or math.isinf(found.total):
            continue
        share = initial_share(found.total, callback.decay, callback.ramp, callback.ramp_steps)
        if share > MOST_INITIAL:
            text = describe_initial_share(share, callback.decay, found.total)
            flag = "ramp_steps null of EMA"
            if not callback.ramp:
                rest = 1 - FORGOTTEN ** (1 / found.total)
                flag = f"ramp true of EMA, or decay {1 - float(f'{rest:.1g}'):g}"
            yield Finding("warning", "EMA", text, flag)


CHECKS = (check_warmup, check_average)
