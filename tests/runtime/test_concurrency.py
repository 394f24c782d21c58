"""Work beside work: the order of jobs and results, a bounded lead, errors, threads, and freed memory."""

import os
import platform
import resource
import subprocess
import sys
import threading

import pytest
import torch

from uvit_decay.runtime.concurrency import free_threads, in_threads, read_ahead

CPU = torch.device("cpu")
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


def test_the_next_tensor_is_read_while_the_last_one_is_used():
    read = [threading.Event() for _ in range(5)]

    def reader(job: int) -> torch.Tensor:
        read[job].set()
        return torch.tensor(job)

    for number, tensor in enumerate(read_ahead(reader, range(5), CPU)):
        assert tensor == number
        assert read[min(number + 1, 4)].wait(10)


def test_results_arrive_in_order_and_several_jobs_run_at_once():
    both = threading.Barrier(2, timeout=30)  # breaks unless two jobs meet here

    def work(job):
        both.wait()
        return job * job

    assert list(in_threads(work, range(8), 2)) == [job * job for job in range(8)]


def test_threads_of_torch_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for ours, expected in ((1, 6), (2, 3), (4, 1), (64, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda ours=ours: ours)
        assert free_threads() == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert free_threads() == 1
