"""Work of one process in several threads: torch computes outside Python's lock, so small networks fill other cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Job = TypeVar("Job")
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
