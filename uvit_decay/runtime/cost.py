"""Measured costs, which long work announces before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor


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
