"""Memory, time and disk space of the whole run, estimated from a few steps, and settings that do not fit its length."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator

from lightning.pytorch import Callback

from uvit_decay.callbacks.best import BestCheckpoint
from uvit_decay.callbacks.ema import EMA, ramped_decay
from uvit_decay.callbacks.last_checkpoint import LastCheckpoint
from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.doctor.rehearsal import Measurements
from uvit_decay.doctor.report import Finding, Plan, duration, gib
from uvit_decay.runs.folder import find_runs
from uvit_decay.tasks import Task
from uvit_decay.terminal.errors import with_flags

TIGHT = 0.9  # share of the memory; beyond it fragments may not fit
FORWARD = 1 / 3  # time of an image without a backward pass, divided by its time in training
MOST_INITIAL = 0.1  # share of the initial weights above which an average is remarked on
FORGOTTEN = 0.01  # share of the initial weights at the end of the run with the decay that is recommended
LOGS = 16 * 2**20  # bytes of logs, pictures and histories; a generous estimate


def check_memory(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Compare the memory of a step with the memory of the device."""
    taken = found.peak
    if run.trainer.strategy.root_device.type == "cpu":
        taken *= run.trainer.num_devices
    step = f"a step of {found.micro_batches} x {found.images} images"
    text = f"{step} takes {gib(taken)} of {gib(found.limit)}"
    smaller = f"--data.device_batch_size {max(1, found.images // 2)}, or --model.net.checkpointing true"
    if taken <= TIGHT * found.limit:
        yield Finding("ok", "memory", text)
    else:
        yield Finding("warning" if taken <= found.limit else "error", "memory", text, smaller)


def estimate_speed(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Report the time of 1000 steps, unless the run is as short as the warm-up of the rehearsal."""
    if found.counted:
        rate = f"{run.data.batch_size / found.step:.4g} images/s"
        text = f"1000 steps take {duration(1000 * found.step)}, {rate}, by {found.counted:.4g} steps"
        yield Finding("ok", "speed", text)


def estimate_callbacks(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Report the time of the evaluations of each callback; warn of a callback that never runs."""
    for callback, evaluations in found.evaluations.items():
        name = type(callback).__name__
        times = _count_times(callback, run, found)
        if not times and run.begun < found.total < math.inf:
            text = f"it never runs: every_n_steps is {callback.every_n_steps}, the run ends at step {found.total:g}"
            shorter = max(1, int(found.total // 4))
            yield Finding("warning", name, text, f"every_n_steps {shorter} of {name}, or at_end true")
        else:
            seconds = duration(evaluations * _forward_seconds(run, found))
            yield Finding("ok", name, f"{times} x {evaluations} network evaluations, about {seconds} each time")


def estimate_evaluations(run: Plan, found: Measurements) -> float:
    """Return the seconds of all evaluations of the callbacks until the end of the run."""
    count = 0
    for callback, evaluations in found.evaluations.items():
        count += _count_times(callback, run, found) * evaluations
    return count * _forward_seconds(run, found)


def _count_times(callback: Periodic, run: Plan, found: Measurements) -> int:
    """Return the number of times that a callback evaluates until the end of the run; 0 if the run has no end."""
    if math.isinf(found.total):
        return 0
    return callback.count_due(found.epoch, run.begun, int(found.total))


def _forward_seconds(run: Plan, found: Measurements) -> float:
    """Return the seconds of a network evaluation of one image."""
    return FORWARD * found.step / run.data.batch_size


def estimate_length(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Report the time of the whole run."""
    if math.isinf(found.total):
        yield Finding("note", "run", "it has no end", "--trainer.max_steps")
        return
    if found.total <= run.begun:
        return
    training = found.step * (found.total - run.begun)
    parts = {"training": training, "callbacks": estimate_evaluations(run, found)}
    parts["validation"] = _estimate_validation(run, found)
    seconds = sum(parts.values())
    shown = ", ".join(f"{duration(part)} of {name}" for name, part in parts.items())
    end = time.strftime("%d %b %H:%M", time.localtime(time.time() + seconds))
    steps = f"{found.total:g} steps"
    if run.begun:
        steps += f" from step {run.begun}"
    yield Finding("ok", "run", f"{steps}, about {duration(seconds)} ({shown}); started now it ends {end}")


def _estimate_validation(run: Plan, found: Measurements) -> float:
    """Return the seconds of all validations of the run; an image takes a third of its time in training."""
    trainer = run.trainer
    test = run.data.test
    limit = trainer.limit_val_batches
    if test is None or limit == 0 or not found.epoch:
        return 0.0
    images = len(test) * limit if isinstance(limit, float) else min(len(test), limit * run.data.batch_size)
    return _count_validations(run, found) * images * _forward_seconds(run, found)


def _count_validations(run: Plan, found: Measurements) -> int:
    """Return the number of validations until the end of the run."""
    trainer = run.trainer
    steps = found.total - run.begun
    interval = getattr(trainer, "val_check_interval", None)
    if interval is None:  # Lightning has it in seconds: --trainer.val_check_interval 00:00:10:00
        return int(steps * found.step / trainer._val_check_time_interval)
    every = interval * found.epoch if isinstance(interval, float) else interval / trainer.accumulate_grad_batches
    return int(steps / max(1, every) / (trainer.check_val_every_n_epoch or 1))


def checkpoint_bytes(task: Task, callbacks: Iterable[Callback], moments: int) -> int:
    """Return the bytes of a checkpoint: weights, the optimizer's state, and float32 averages.

    Args:
        task: the task.
        callbacks: callbacks of the run.
        moments: bytes of the optimizer's state, see `uvit_decay.doctor.rehearsal.state_bytes`.
    """
    weights = sum(tensor.nbytes for tensor in task.state_dict().values())
    parameters = sum(parameter.numel() for parameter in task.net.parameters())
    averages = sum(isinstance(callback, EMA) for callback in callbacks)
    return weights + moments + 4 * averages * parameters


def count_checkpoints(callbacks: Iterable[Callback], begun: int, total: float) -> float:
    """Return the number of checkpoints that the run leaves; infinite if it keeps some permanently and has no end.

    Args:
        callbacks: callbacks of the run.
        begun: first step of the run.
        total: last step of the run, which may be infinite.
    """
    count = 0.0
    for callback in callbacks:
        if isinstance(callback, BestCheckpoint):
            count += 1
        if not isinstance(callback, LastCheckpoint):
            continue
        saves = 1.0
        if callback.every_n_steps:
            saves += (total - begun) // callback.every_n_steps
        count += min(callback.keep_last, saves)
        every = callback.keep_every_n_steps
        if every and math.isinf(total):
            return math.inf
        if every:
            count += total // every - begun // every
    return count


def check_disk(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Compare the size of the files of the run with the free space of their file system."""
    trainer = run.trainer
    size = checkpoint_bytes(run.task, trainer.callbacks, found.moments)
    kept = count_checkpoints(trainer.callbacks, run.begun, found.total)
    hint = "a larger keep_every_n_steps of LastCheckpoint, or --trainer.logger.save_dir <a larger disk>"
    if math.isinf(kept):
        yield Finding("warning", "disk", "checkpoints are kept as long as the run lasts, and it has no end", hint)
        kept = 1
    need = kept * size + LOGS
    if kept:
        need += size  # a checkpoint is complete before it replaces the previous one
    folder, _ = find_runs(trainer.loggers, trainer.default_root_dir)
    path = folder.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    text = f"{kept:.0f} checkpoints of {gib(size)} and logs need {gib(need)} in {folder}, {gib(free)} are free"
    if need < free:
        yield Finding("ok", "disk", text)
    else:
        yield Finding("error", "disk", text, hint)


def check_warmup(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Warn if the run ends within its warm-up."""
    optim = run.task.optim
    shorter = optim.find_shorter_warmup(found.total, found.epoch)
    if shorter is not None:
        text = f"the run ends at step {found.total:g}, its warm-up takes {optim.warmup(found.epoch):g} steps"
        yield Finding("warning", "warm-up", text, with_flags(shorter))


def check_average(run: Plan, found: Measurements) -> Iterator[Finding]:
    """Warn if the average of the weights, from which samples and probes come, keeps much of the initial weights."""
    for callback in run.trainer.callbacks:
        if not isinstance(callback, EMA) or math.isinf(found.total):
            continue
        share = initial_share(found.total, callback.decay, callback.ramp, callback.ramp_steps)
        if share > MOST_INITIAL:
            made = f"after {found.total:g} updates of decay {callback.decay:g}"
            text = f"{100 * share:.0f} % of the average are initial weights {made}"
            flag = "ramp_steps null of EMA"
            if not callback.ramp:
                rest = 1 - FORGOTTEN ** (1 / found.total)
                flag = f"ramp true of EMA, or decay {1 - float(f'{rest:.1g}'):g}"
            yield Finding("warning", "EMA", text, flag)


def initial_share(updates: float, decay: float, ramp: bool = True, ramp_steps: int | None = None) -> float:
    """Return the share of the initial weights in an average, in [0, 1]: the product of the decays of its updates.

    Args:
        updates: number of updates; infinite for a run without an end.
        decay: the final decay.
        ramp: whether the decay rises to its final value.
        ramp_steps: see `ramped_decay`.
    """
    if not ramp:
        return decay**updates
    share = 1.0
    done = 0
    while done < updates and share > MOST_INITIAL / 100:
        share *= ramped_decay(decay, done, ramp_steps)
        done += 1
    return share


CHECKS = (estimate_callbacks, check_memory, estimate_speed, estimate_length, check_disk, check_warmup, check_average)
