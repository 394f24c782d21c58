"""Two processes that communicate over gloo, to compare results of one and of several processes.

They are programs of the zygote: this file, which reads a function from a file and calls it on its rank.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from programs import Launcher

from uvit_decay.tasks.parallel.ddp import register_ddp


def on_two_processes(programs: Launcher, work: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return what `work(rank)` returns on both ranks, through JSON; `work` is a function of a test module.

    A Lightning trainer of two devices in these processes is one of two ranks, on one thread, as in train.py.
    """
    with (folder / "work.pickle").open("wb") as file:
        pickle.dump(sys.path, file)  # first: the test module, which pytest has imported, is found by it
        pickle.dump(work, file)
    programs.run_ranks(2, "tests/shared/gloo.py", str(folder), cwd=Path.cwd())
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def work_on_rank(folder: Path) -> None:
    """Call the function of `on_two_processes` as one rank, and write what it returns."""
    with (folder / "work.pickle").open("rb") as file:
        sys.path[:] = pickle.load(file)
        work = pickle.load(file)
    register_ddp()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / str(rank)).write_text(json.dumps(work(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    work_on_rank(Path(sys.argv[1]))
