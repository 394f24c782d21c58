"""What launchers tell a process about the others: torchrun, accelerate launch, srun, Lightning's variables."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

COUNTS = {  # environment variables in which launchers pass the number of processes
    "WORLD_SIZE": "torchrun",
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which is also set in a batch script that calls torchrun
}


@dataclass(frozen=True)
class Place:
    """The place of a process among `size`, and where they meet: `address` and `port` of rank 0.

    Args:
        rank: from 0 to size - 1; -1 if only the node is known.
        size: processes of the program; None if it is not known yet.
        local_rank: number among the processes of this node.
        address: host name or IP address of the node of rank 0.
        port: of the store there, by which processes find one another.
        served: whether the launcher serves the store, not rank 0.
    """

    rank: int
    size: int | None
    local_rank: int
    address: str
    port: int
    served: bool = False

    @property
    def where(self) -> str:
        """The meeting place in messages."""
        return f"{self.address}:{self.port} (MASTER_ADDR, MASTER_PORT)"

    @classmethod
    def of_environment(cls) -> Place | None:
        """Return the place that a launcher has given this process; None for a program of one process."""
        size, launcher = requested()
        if launcher == "srun" and size > 1:
            ranks = _number("SLURM_PROCID"), size, _number("SLURM_LOCALID")
            return cls(*ranks, os.environ.get("MASTER_ADDR") or _first_node(), _number("MASTER_PORT") or _slurm_port())
        address, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT")
        if not (address and port):
            return None
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if size > 1 and "RANK" in os.environ:
            return cls(_number("RANK"), size, _number("LOCAL_RANK"), address, port, served)
        if "NODE_RANK" not in os.environ:
            return None
        first = _number("NODE_RANK") == 0 and _number("LOCAL_RANK") == 0  # of a program started on every node by hand
        return cls(0 if first else -1, None, _number("LOCAL_RANK"), address, port)


def requested() -> tuple[int, str]:
    """Return how many processes the launcher was asked for, and its name; (1, "python") if no launcher is found."""
    counts = [(int(os.environ[key]), name) for key, name in COUNTS.items() if os.environ.get(key, "").isdecimal()]
    return max(counts, default=(1, "python"))


def _number(name: str) -> int:
    return int(os.environ.get(name) or 0)


def _first_node() -> str:
    """Return the first name in SLURM's list of nodes: gpu[07-09,12] begins with gpu07."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _slurm_port() -> int:
    """Return the port that Lightning derives from the number of the job."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return 15000 + int(job[-4:]) if job.isdecimal() else 12910
