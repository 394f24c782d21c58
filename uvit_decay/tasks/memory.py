"""A training step that runs out of memory: which flags make it smaller."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from uvit_decay.data.batches import pieces
from uvit_decay.runtime.errors import UserError

if TYPE_CHECKING:
    from uvit_decay.tasks.base import Task

# In messages of torch's allocators that raise no torch.OutOfMemoryError: of CPUs, of MPS, of libraries on GPUs.
WORDS = re.compile(r"DefaultCPUAllocator|out of memory|CUBLAS_STATUS_ALLOC_FAILED|bad_alloc", re.IGNORECASE)
SIZE = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


@contextmanager
def enough_memory(task: Task) -> Iterator[None]:
    """Turn the body's lack of memory into a UserError of one line that names the flags for smaller pieces."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        size = SIZE.search(str(error))
        asked = f" (it tried to allocate {size[1]})" if size else ""
        step, advice = task.trainer.global_step, "; or ".join(_advice(task))
        raise UserError(f"{task.device} is out of memory at step {step}{asked}: {advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch, or of Python, says that memory could not be allocated."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or WORDS.search(str(error)) is not None


def _advice(task: Task) -> Iterator[str]:
    """Yield what makes a step of this run smaller, the least costly first."""
    trainer, data = task.trainer, task.trainer.datamodule
    share = data.batch_size // trainer.world_size
    piece = share // data.pieces
    if piece > 1:
        smaller = share // pieces(share, piece // 2)
        yield f"set --data.device_batch_size {smaller} (pieces of {piece} images now), which trains the same network"
    if task.net.config.get("checkpointing") is False:
        yield "set --model.net.checkpointing true, for less memory and more time"
    if piece == 1 or trainer.world_size > 1:
        yield "shard the network over more devices with --trainer.strategy fsdp"
