"""Work in threads: the order of its jobs, a bounded lead, errors, and as many threads as there are cores."""

import os
import threading

import pytest
import torch

from uvit_decay.runtime.concurrency import free_threads, in_threads


def test_results_arrive_in_order_and_several_jobs_run_at_once():
    both = threading.Barrier(2, timeout=30)  # breaks unless two jobs meet here

    def work(job):
        both.wait()
        return job * job

    assert list(in_threads(work, range(8), 2)) == [job * job for job in range(8)]


def test_no_more_jobs_are_taken_than_the_threads_and_one():
    taken = []

    def jobs():
        for job in range(100):
            taken.append(job)
            yield job

    results = in_threads(str, jobs(), 3)
    assert next(results) == "0"
    assert len(taken) == 4
    results.close()


def test_an_error_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda job: 1 / job, [1, 0, 2], 2))


def test_threads_of_torch_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for ours, expected in ((1, 6), (2, 3), (4, 1), (64, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda ours=ours: ours)
        assert free_threads() == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert free_threads() == 1
