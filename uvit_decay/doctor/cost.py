"""What the whole run costs, from what a few steps cost: memory, time, disk, the end."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator

from lightning.pytorch import Callback

from uvit_decay.callbacks.checkpoint import LastCheckpoint
from uvit_decay.callbacks.ema import EMA
from uvit_decay.doctor.rehearsal import FORWARD, Measured
from uvit_decay.doctor.report import Finding, Level, Run, duration, gib
from uvit_decay.tasks import Task
from uvit_decay.tasks.own import own_parameters
from uvit_decay.tasks.resumption.files import runs_of

TIGHT = 0.9  # share of the memory beyond which fragments may not fit
LOGS = 16 * 2**20  # bytes of logs, pictures and histories, generously


def memory(run: Run, found: Measured) -> Iterator[Finding]:
    """Compare the memory of a step with that of the device."""
    on_cpu = run.trainer.strategy.root_device.type == "cpu"
    taken = found.peak * (run.trainer.num_devices if on_cpu else 1)
    step = f"a step of {found.micro_batches} x {found.images} images"
    text = f"{step} takes {gib(taken)} of {gib(found.limit)}"
    level: Level = "ok" if taken <= TIGHT * found.limit else "warning" if taken <= found.limit else "error"
    smaller = f"--data.device_batch_size {max(1, found.images // 2)}, or --model.net.checkpointing true"
    yield Finding(level, "memory", text, "" if level == "ok" else smaller)


def speed(run: Run, found: Measured) -> Iterator[Finding]:
    """Say how long 1000 steps take."""
    if found.counted:  # else the run is as short as the warm-up
        rate = f"{run.data.batch_size / found.step:.4g} images/s"
        text = f"1000 steps take {duration(1000 * found.step)}, {rate}, by {found.counted:.4g} steps"
        yield Finding("ok", "speed", text)


def length(run: Run, found: Measured) -> Iterator[Finding]:
    """Say how long the whole run takes."""
    if math.isinf(found.total):
        yield Finding("note", "run", "it has no end", "--trainer.max_steps")
    elif found.total > run.begun:
        training = found.step * (found.total - run.begun)
        parts = {"training": training, "callbacks": found.evaluating, "validation": _validation(run, found)}
        seconds, begun = sum(parts.values()), f" from step {run.begun}" if run.begun else ""
        shown = ", ".join(f"{duration(part)} of {name}" for name, part in parts.items())
        end = time.strftime("%d %b %H:%M", time.localtime(time.time() + seconds))
        text = f"{found.total:g} steps{begun}, about {duration(seconds)} ({shown}); started now it ends {end}"
        yield Finding("ok", "run", text)


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


def checkpoint_bytes(task: Task, callbacks: Iterable[Callback]) -> int:
    """Return the bytes of a checkpoint: weights, the optimizer's moments, and float32 averages."""
    trained = sum(p.nbytes for p in task.net.parameters() if p.requires_grad)
    trained += sum(p.nbytes for _, p in own_parameters(task))
    weights = sum(tensor.nbytes for tensor in task.state_dict().values())
    averages = sum(isinstance(callback, EMA) for callback in callbacks)
    averaged = 4 * averages * sum(parameter.numel() for parameter in task.net.parameters())
    return weights + task.optim.tensors_per_parameter() * trained + averaged


def kept_checkpoints(callbacks: Iterable[Callback], begun: int, total: float) -> float:
    """Return how many checkpoints the run leaves; infinite if it keeps some for ever and has no end."""
    count = 0.0
    for callback in callbacks:
        if isinstance(callback, LastCheckpoint):
            every = callback.keep_every_n_steps
            saves = 1 + (total - begun) // callback.every_n_steps if callback.every_n_steps else 1
            count += min(callback.keep_last, saves)
            if every:
                count += total // every - begun // every if math.isfinite(total) else math.inf
    return count


def disk(run: Run, found: Measured) -> Iterator[Finding]:
    """Compare what the run will write with the free space of the file system that takes it."""
    size = checkpoint_bytes(run.task, run.trainer.callbacks)
    kept = kept_checkpoints(run.trainer.callbacks, run.begun, found.total)
    hint = "a larger keep_every_n_steps of LastCheckpoint, or --trainer.logger.save_dir <a larger disk>"
    if math.isinf(kept):
        yield Finding("warning", "disk", "checkpoints are kept as long as the run lasts, and it has no end", hint)
        kept = 1
    # A checkpoint is complete before it replaces the previous one.
    folder, need = runs_of(run.trainer.loggers, run.trainer.default_root_dir)[0], (kept + bool(kept)) * size + LOGS
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    text = f"{kept:.0f} checkpoints of {gib(size)} and logs need {gib(need)} in {folder}, {gib(free)} are free"
    yield Finding("ok", "disk", text) if need < free else Finding("error", "disk", text, hint)


CHECKS = (memory, speed, length, disk)
