"""The rate of matrix products of a device, against which the speed of training is compared, and its memory."""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

SIDES = {"cuda": 4096}  # side of the square product that is timed
SIDE = 1024  # with which CPUs reach their rate
SECONDS = 0.1  # time of the products that are timed


def counted_flops(work: Callable[[], object]) -> int:
    """Return the floating-point operations of the matrix products, convolutions and attention of `work()`."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square product in this dtype, with the threads that are set; it takes 0.2 s once."""
    return _matrix_rate(device, dtype, torch.get_num_threads() if device.type == "cpu" else 1)


@functools.cache
def _matrix_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    side = SIDES.get(device.type, SIDE)
    a, b = (torch.full((side, side), 0.5, dtype=dtype, device=device) for _ in range(2))
    timer = Timer(
        "torch.mm(a, b, out=out)", globals={"torch": torch, "a": a, "b": b, "out": a @ b}, num_threads=threads
    )
    return 2 * side**3 / min(timer.blocked_autorange(min_run_time=SECONDS).times)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes of a GPU's memory that tensors of this process held, elsewhere its largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measured_seconds(call: Callable[[], Tensor]) -> float:
    """Return the seconds of one call after a warm-up; the sum of its result is read, so that the device is awaited."""
    call().sum().item()
    start = time.perf_counter()
    call().sum().item()
    return time.perf_counter() - start


def estimated_seconds(call: Callable[[int], Tensor], count: int, batch_size: int) -> float:
    """Estimate the seconds of `count` images, `call(b)` being the work of b of them; costs at most 2 % of that."""
    batch = max(1, min(batch_size, count // 100))
    return count * measured_seconds(lambda: call(batch)) / batch
