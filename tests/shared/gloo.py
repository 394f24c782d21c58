"""Two processes that talk over gloo, for what must be the same on one and on many."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from uvit_decay.tasks.sharding import register_ddp

# Clean processes like those of spawn, but what is slow to import is imported once for all tests.
IMPORTED_ONCE = ["pytest", "scipy.linalg", "uvit_decay.callbacks"]


def on_two_processes(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """What `work(rank)` returns on both ranks, through JSON; `work` is a function of a test module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    multiprocessing.start_processes(_one_of_two, (work, address, folder), nprocs=2, start_method="forkserver")
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def _one_of_two(rank: int, work: Callable[[int], Any], address: str, folder: Path) -> None:
    dist.init_process_group("gloo", address, rank=rank, world_size=2)
    (folder / str(rank)).write_text(json.dumps(work(rank)))
    dist.destroy_process_group()


def lightning_rank(rank: int) -> None:
    """Let a Lightning trainer of two devices in this process be one of two ranks, on one thread, as train.py does."""
    torch.set_num_threads(1)
    register_ddp()
    variables = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
    variables |= {"RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in variables.items()}
