"""Reading ahead and late results: the order is kept, and what runs when is as said."""

import threading

import pytest
import torch

from uvit_decay.runtime.concurrency import on_cpu, read_ahead

CPU = torch.device("cpu")


def test_the_next_tensor_is_read_while_the_last_one_is_used():
    read = [threading.Event() for _ in range(5)]

    def reader(job: int) -> torch.Tensor:
        read[job].set()
        return torch.tensor(job)

    for number, tensor in enumerate(read_ahead(reader, range(5), CPU)):
        assert tensor == number
        assert read[min(number + 1, 4)].wait(10)


def test_an_error_of_the_reader_is_raised_by_its_job():
    def reader(job: int) -> torch.Tensor:
        return torch.tensor(1 / (2 - job))

    tensors = read_ahead(reader, range(4), CPU)
    assert [float(next(tensors)) for _ in range(2)] == [0.5, 1.0]
    with pytest.raises(ZeroDivisionError):
        next(tensors)


def test_a_result_is_fetched_when_the_next_one_is_under_way():
    begun = []

    def work(number: int) -> torch.Tensor:
        begun.append(number)
        return torch.tensor(number)

    fetched = [(int(result), len(begun)) for result in on_cpu(map(work, range(4)))]
    assert fetched == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert list(on_cpu([])) == []
