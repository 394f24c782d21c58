"""Threads beside the network: their number, reading ahead, and the reuse of freed memory."""

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

    If `device` is a CUDA GPU, tensors on the CPU are pinned, so that copying them does not wait.
    """

    def read_and_pin(job: Job) -> Tensor:
        tensor = read(job)
        if device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory()
        return tensor

    yield from in_threads(read_and_pin, jobs, 1)


Result = TypeVar("Result")


def free_threads() -> int:
    """Return the number of CPU cores of this process divided by torch's number of threads, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    if affinity:
        cores = len(affinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // torch.get_num_threads())


def in_threads(work: Callable[[Job], Result], jobs: Iterable[Job], threads: int) -> Iterator[Result]:
    """Yield work(job) of each job, in order, computed by `threads` threads up to `threads` results ahead.

    Modes of torch that belong to a thread, such as no_grad and autocast, are off when `work` begins.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
