"""Two processes that talk over gloo, for what must be the same on one and on many."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import ranks
from torch import multiprocessing

from uvit_decay.tasks.sharding import register_ddp

# Clean processes like those of spawn, but what is slow to import is imported once for all tests.
IMPORTED_ONCE = ["pytest", "scipy.linalg", "uvit_decay.callbacks"]


def on_two_processes(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """What `work(rank)` returns on both ranks, through JSON; `work` is a function of a test module.

    A Lightning trainer of two devices in these processes is one of two ranks, on one thread, as in train.py.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    multiprocessing.start_processes(_one_of_two, (work, ranks(), folder), nprocs=2, start_method="forkserver")
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def _one_of_two(rank: int, work: Callable[[int], Any], variables: list[dict[str, str]], folder: Path) -> None:
    os.environ |= variables[rank]
    torch.set_num_threads(1)
    register_ddp()
    dist.init_process_group("gloo")
    (folder / str(rank)).write_text(json.dumps(work(rank)))
    dist.destroy_process_group()
