"""What the whole run costs, from what a few steps cost: memory, time, callbacks, the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from uvit_decay.doctor.plan import Run, duration, gib
from uvit_decay.doctor.rehearsal import FORWARD, Measured
from uvit_decay.doctor.report import Finding
from uvit_decay.doctor.space import checkpoint_bytes, kept_checkpoints

TIGHT = 0.9  # share of the memory beyond which fragments may not fit
HALF = 0.5  # share of the run that evaluations may take without a remark


def memory(run: Run, found: Measured) -> Iterator[Finding]:
    """Compare the memory of a step with that of the device."""
    on_cpu = run.trainer.strategy.root_device.type == "cpu"
    processes = run.trainer.num_devices if on_cpu else 1
    taken = found.peak * processes
    where = f"all {processes} processes" if processes > 1 else "a process" if on_cpu else "a GPU"
    step = f"a step of {found.micro_batches} x {found.images} images"
    text = f"{step} takes {gib(taken)} of the {gib(found.limit)} of {where}"
    smaller = f"--data.device_batch_size {max(1, found.images // 2)}"
    if "checkpointing" in run.task.net.config and not run.task.net.config["checkpointing"]:
        smaller += " or --model.net.checkpointing true"
    if taken <= TIGHT * found.limit:
        yield Finding("ok", "memory", text)
    elif taken <= found.limit:
        yield Finding("warning", "memory", text, smaller)
    else:
        yield Finding("error", "memory", text, smaller)


def speed(run: Run, found: Measured) -> Iterator[Finding]:
    """Say how long 1000 steps take."""
    rate = run.data.batch_size / found.step
    text = f"1000 steps take {duration(1000 * found.step)}, {rate:.4g} images/s"
    yield Finding("ok", "speed", f"{text}, by {found.counted:.4g} steps")


def callbacks(run: Run, found: Measured) -> Iterator[Finding]:
    """Name what each evaluation costs."""
    for cost in found.costs:
        if cost.error:
            yield Finding("error", cost.name, cost.error)
            continue
        often = {0: "never in this run", 1: "once"}.get(cost.times, f"{cost.times} times")
        text = f"{cost.evaluations} network evaluations, about {duration(cost.seconds)} each time, {often}"
        slow = cost.seconds * cost.times > HALF * _training(run, found)
        flag = "a larger every_n_steps, or fewer images" if slow else ""
        yield Finding(
            "note" if slow else "ok", cost.name, text + (", over half as long as training" if slow else ""), flag
        )


def length(run: Run, found: Measured) -> Iterator[Finding]:
    """Say how long the whole run takes, and remark on ends that are probably not meant."""
    optim, total = run.task.optim, found.total
    warmup = optim.warmup(found.epoch)
    if total <= warmup:
        text = f"the run ends at step {total:g}, before its warm-up of {warmup:g} steps"
        yield Finding("note", "warm-up", text, f"{optim.flags()[1]}, or a higher --trainer.max_steps")
    if math.isinf(total):
        yield Finding("note", "run", "it has no end", "--trainer.max_steps")
        return
    if total <= run.begun:
        return
    evaluating = sum(cost.seconds * cost.times for cost in found.costs)
    validating = _validation(run, found)
    seconds = _training(run, found) + evaluating + validating
    size = kept_checkpoints(run.trainer.callbacks, run.begun, total) * checkpoint_bytes(run.task, run.trainer.callbacks)
    end = time.strftime("%d %b %H:%M", time.localtime(time.time() + seconds))
    begun = f" from step {run.begun}" if run.begun else ""
    parts = f"{duration(_training(run, found))} of training, {duration(evaluating)} of callbacks"
    parts += f", {duration(validating)} of validation" if validating else ""
    limit = (
        f"; --trainer.max_time {run.settings['trainer.max_time']} may end it earlier"
        if run.settings.get("trainer.max_time")
        else ""
    )
    text = f"{total:g} steps{begun}, about {duration(seconds)} ({parts}); started now it ends {end}{limit}"
    yield Finding("ok", "run", f"{text}; leaves {gib(size)} of checkpoints")


def _training(run: Run, found: Measured) -> float:
    return found.step * (found.total - run.begun)


def _validation(run: Run, found: Measured) -> float:
    """Return the seconds of all validations of the run, an image of which takes a third of one of training."""
    trainer, test = run.trainer, run.data.test
    limit = trainer.limit_val_batches
    if test is None or limit == 0 or not found.epoch:
        return 0.0
    images = len(test) * limit if isinstance(limit, float) else min(len(test), limit * run.data.batch_size)
    interval, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
    every = interval * found.epoch if isinstance(interval, float) else interval / trainer.accumulate_grad_batches
    times = (found.total - run.begun) / max(1, every) / (epochs or 1)
    return int(times) * images * found.step * FORWARD / run.data.batch_size


CHECKS = (memory, speed, callbacks, length)
