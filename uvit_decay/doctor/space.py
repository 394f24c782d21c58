"""What a run puts on disks, and what it needs from the network: checkpoints, features of references, weights."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from lightning.pytorch import Callback

from uvit_decay.callbacks.checkpoint import LastCheckpoint
from uvit_decay.callbacks.ema import EMA
from uvit_decay.callbacks.generation import GenerationMetrics
from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.data import ImageData
from uvit_decay.doctor.plan import Run, gib
from uvit_decay.doctor.report import Finding
from uvit_decay.evaluation.feature_store import cache_folder
from uvit_decay.tasks import Task
from uvit_decay.tasks.optimization import BUFFERS

LOGS = 16 * 2**20  # bytes of logs, pictures and histories, generously


def checkpoint_bytes(task: Task, callbacks: Iterable[Callback]) -> int:
    """Return the bytes of a checkpoint: weights, the optimizer's moments, and averages."""
    trained = sum(p.nbytes for p in task.net.parameters() if p.requires_grad)
    weights = sum(tensor.nbytes for tensor in {*task.net.parameters(), *task.net.buffers()})
    return weights + len(BUFFERS[task.optim.optimizer]) * trained + _averages(task, callbacks)


def _averages(task: Task, callbacks: Iterable[Callback]) -> int:
    each = 4 * sum(parameter.numel() for parameter in task.net.parameters())  # float32
    return each * sum(len(callback.averages) for callback in callbacks if isinstance(callback, EMA))


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


def disk(run: Run, total: float) -> Iterator[Finding]:
    """Compare what the run will write with the free space of the file systems that take it.

    Args:
        run: the run.
        total: its optimizer steps, which may be infinite.
    """
    size, kept = (
        checkpoint_bytes(run.task, run.trainer.callbacks),
        kept_checkpoints(run.trainer.callbacks, run.begun, total),
    )
    per_run = f"{kept:.0f} checkpoint{'s' * (kept != 1)} of {gib(size)} and logs"
    hint = "--trainer.logger.save_dir <a larger disk>"
    if kept > 1:
        hint = f"a larger keep_every_n_steps of LastCheckpoint, or {hint}"
    if math.isinf(kept):
        yield Finding("warning", "disk", "checkpoints are kept as long as the run lasts, and it has no end", hint)
        kept = 1
    temporary = size if kept else 0  # a checkpoint is complete before it replaces the one before
    needs = [(run.folder, kept * size + temporary + LOGS, per_run, hint)]
    features = sum(_reference_bytes(callback, run.data) for callback in run.periodic)
    if features:
        needs.append((cache_folder(), features, "features of references", "XDG_CACHE_HOME=<a larger disk>"))
    for folder, need, what, flag in needs:
        place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(place).free
        text = f"{what} need {gib(need)} in {folder}, {gib(free)} are free"
        yield Finding("ok", "disk", text) if need < free else Finding("error", "disk", text, flag)


def _reference_bytes(callback: Periodic, data: ImageData) -> int:
    """Return the bytes of the features of a reference that a callback caches on this machine."""
    if not isinstance(callback, GenerationMetrics) or callback.reference is not None or data.latents:
        return 0
    return 4 * sum(callback.extractor.widths.values()) * min(callback.max_reference, len(data.train))


def missing_weights(callback: Callback, data: ImageData) -> list[str]:
    """Return the networks that a callback needs and that are not on this machine."""
    if not isinstance(callback, GenerationMetrics):
        return []
    missing = [] if (name := callback.extractor.missing()) is None else [name]
    vae = data.latents.vae if data.latents else None
    if vae and not Path(vae).is_dir() and not isinstance(try_to_load_from_cache(vae, "config.json"), str):
        missing.append(f"the autoencoder {vae}")
    return missing


def weights(run: Run) -> Iterator[Finding]:
    """Name the networks of other people that the callbacks need, and that are not here."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    missing = {name: callback for callback in run.periodic for name in missing_weights(callback, run.data)}
    for name, callback in missing.items():
        hub = offline and "Inception" not in name  # all others come from the Hugging Face hub
        text = f"{type(callback).__name__} needs {name}, not on this machine"
        text += ", and HF_HUB_OFFLINE is set" if hub else ": it is downloaded when the run starts"
        flag = "fetch it where there is a network, as docs/evaluation.md says, or remove the callback"
        yield Finding("error" if hub else "warning", "weights", text, flag)
    if not missing and any(isinstance(callback, GenerationMetrics) for callback in run.periodic):
        yield Finding("ok", "weights", "all networks that the callbacks need are on this machine")
