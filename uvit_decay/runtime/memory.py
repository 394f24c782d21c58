"""Memory of the process on CPUs."""

from __future__ import annotations

import ctypes
import platform

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
