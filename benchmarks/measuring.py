"""Timing of runs in turn, the spread of a few values, added memory and model FLOPs."""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

Run = Callable[[], object]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SECONDS = 0.1  # least time of the timed products
LARGE, SMALL = 1024, 256  # rows of the matrices of `matrix_rate` on a CPU, and if a product of large ones takes longer:
LONGEST = 0.5  # seconds


class Spread(NamedTuple):
    """Quartiles of a few values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the quartiles; of a single value three times the value."""
        return cls(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3))


@dataclass(frozen=True)
class Clock:
    """Seconds that runs take on a device.

    Args:
        device: waited for before the clock is read.
        cpu_time: count the CPU time of this process and its children, where other work is done beside.
    """

    device: torch.device
    cpu_time: bool = False

    def now(self) -> float:
        """Return the time, when the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if not self.cpu_time:
            return time.perf_counter()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)  # readers of images, when they have ended
        return time.process_time() + children.ru_utime + children.ru_stime

    def seconds(self, run: Run) -> float:
        """Return the seconds of one call."""
        start = self.now()
        run()
        return self.now() - start

    def in_turn(self, runs: Mapping[str, Run], repeats: int, budget: float = float("inf")) -> dict[str, list[float]]:
        """Return the seconds of each run, one value a round.

        Every round calls all runs, in the opposite order of the round before, so that a drift of the machine hits all
        alike. No round starts after `budget` seconds on the wall, but for the first.
        """
        found: dict[str, list[float]] = {name: [] for name in runs}
        start = time.perf_counter()
        for number in range(repeats):
            if number and time.perf_counter() - start > budget:
                break
            for name in [*runs][:: -1 if number % 2 else 1]:
                found[name].append(self.seconds(runs[name]))
        return found


def ratios(above: list[float], below: list[float]) -> Spread:
    """Return the spread of above / below over values of one round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def model_flops(run: Run) -> int:
    """Return the FLOPs of the matrix products, attentions and convolutions in a call, on any device, meta included."""
    # Other attention computes products of the forward pass again in the backward pass.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def added_memory(run: Run, device: torch.device) -> int | None:
    """Return the bytes that a call holds at most beyond those held before it; None where the system cannot tell.

    On CPUs it is resident memory, which Linux counts; freed memory is returned to the system before.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if sys.platform != "linux":
        run()
        return None
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the present size
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(key: str) -> int:
    """Return the bytes of one line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def matrix_rate(device: torch.device, dtype: torch.dtype, threads: int, clock: Callable[[], float]) -> float:
    """Return the FLOP/s of a square product in this dtype.

    On a CPU the matrices are small if larger ones take long, as in bfloat16 without bfloat16 instructions.

    Args:
        device: the device.
        dtype: type of the matrices.
        threads: number of threads on a CPU.
        clock: function that returns the time in seconds, when the device has finished.
    """
    # Random numbers, as in training: a GPU multiplies constant matrices faster, since it takes less power.
    random = torch.Generator(device).manual_seed(0)

    def draw(side: int) -> Tensor:
        return torch.randn(side, side, generator=random, device=device).to(dtype)

    options = {"num_threads": threads, "timer": clock}
    side = 4096 if device.type == "cuda" else LARGE  # large enough to reach the rate
    if device.type == "cpu":
        small = Timer("torch.mm(a, a)", globals={"torch": torch, "a": draw(SMALL)}, **options)
        if small.timeit(2).mean * (LARGE / SMALL) ** 3 > LONGEST:
            side = SMALL
    a, b = draw(side), draw(side)
    names = {"torch": torch, "a": a, "b": b, "out": a @ b}
    timer = Timer("torch.mm(a, b, out=out)", globals=names, **options)
    seconds = min(timer.blocked_autorange(min_run_time=SECONDS).times)
    return 2 * side**3 / seconds
