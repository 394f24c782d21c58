"""Work beside work: how many threads, reading ahead of the network, and memory that is freed."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt in malloc.h
LARGEST = 32 * 2**20  # bytes; glibc maps larger blocks from the system each time


def keep_freed_memory() -> None:
    """Make glibc's malloc reuse freed memory, rather than return it to the system and fault it in again page by page.

    Networks are about 1.1 times as fast on CPUs (docs/LOG.md). The process holds the most memory that it has needed
    until it ends. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGEST)
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


Job = TypeVar("Job")


def read_ahead(read: Callable[[Job], Tensor], jobs: Iterable[Job], device: torch.device) -> Iterator[Tensor]:
    """Yield `read(job)` for all jobs, in order; a thread reads the next one while the caller uses the last one.

    For CUDA GPUs tensors on the CPU are pinned there, so that copying them does not wait.
    """

    def pinned(job: Job) -> Tensor:
        tensor = read(job)
        return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor

    yield from in_threads(pinned, jobs, 1)


Result = TypeVar("Result")


def free_threads() -> int:
    """Return how many threads, each with as many of torch's as are set, the CPU cores of this process hold."""
    affinity = getattr(os, "sched_getaffinity", None)  # systems other than Linux have none
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // torch.get_num_threads())


def in_threads(work: Callable[[Job], Result], jobs: Iterable[Job], threads: int) -> Iterator[Result]:
    """Yield work(job) of each job, in order, computed by `threads` threads, which are that many results ahead.

    Modes of torch that belong to a thread, such as no_grad and autocast, are off when `work` begins.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)
