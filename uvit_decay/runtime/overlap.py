"""Work of the host beside the work of the device: reading ahead, and results that are fetched one batch late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from uvit_decay.runtime.threads import in_threads

Job = TypeVar("Job")


def read_ahead(read: Callable[[Job], Tensor], jobs: Iterable[Job], device: torch.device) -> Iterator[Tensor]:
    """Yield `read(job)` for all jobs, in order; a thread reads the next one while the caller uses the last one.

    For CUDA GPUs tensors on the CPU are pinned there, so that copying them does not wait.
    """

    def pinned(job: Job) -> Tensor:
        tensor = read(job)
        return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor

    yield from in_threads(pinned, jobs, 1)


def on_cpu(results: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors on the CPU, in order, each after the work of the next one was given to its device.

    So a CUDA GPU goes on while the host waits for a result; elsewhere copies wait.
    """
    waiting: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
    for result in results:
        waiting.append(_sent(result))
        if len(waiting) > 1:
            yield _arrived(*waiting.popleft())
    yield from (_arrived(*sent) for sent in waiting)


def _sent(result: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if result.device.type != "cuda":
        return result.cpu(), None
    copy, event = result.to("cpu", non_blocking=True), torch.cuda.Event()  # the copy is in pinned memory
    event.record()
    return copy, event


def _arrived(copy: Tensor, event: torch.cuda.Event | None) -> Tensor:
    if event is not None:
        event.synchronize()
    return copy
