"""Freed memory is used again."""

import platform
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from uvit_decay.runtime.concurrency import keep_freed_memory

keep_freed_memory()
for repeat in range(9):
    if repeat == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(2**21), np.ones(2**20)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of glibc")
def test_freed_memory_is_not_faulted_in_again():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    pages = (2**21 + 2**20) * 8 // resource.getpagesize()
    assert int(done.stdout) < pages, "less than one of eight rounds"
