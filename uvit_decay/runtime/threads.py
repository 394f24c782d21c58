"""Limit of torch's CPU threads: more slow down small work, and another number changes the rounding of sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Limit torch to `count` CPU threads within the context; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
