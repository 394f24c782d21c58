"""Two processes that talk over gloo, for what must be the same on one and on many."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import multiprocessing

# Clean processes like those of spawn, but what is slow to import is imported once for all tests.
IMPORTED_ONCE = ["pytest", "scipy.linalg", "uvit_decay.metrics.frechet", "uvit_decay.metrics.inception"]


def on_two_processes(work: Callable[[int, str, Path], None], folder: Path) -> list[Any]:
    """What `work(rank, address, folder)` has written as JSON to folder / str(rank), for both ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    multiprocessing.start_processes(work, (address, folder), nprocs=2, start_method="forkserver")
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
