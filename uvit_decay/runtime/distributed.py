"""Programs on several processes, started by `torchrun`, `accelerate launch` or `srun`; rank 0 gathers the results.

Results are the same, in the same order, as on one process.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from uvit_decay.files.download import checksum
from uvit_decay.files.writing import writing
from uvit_decay.runtime.concurrency import keep_freed_memory
from uvit_decay.terminal.errors import UserError, explain, one_line

Job = TypeVar("Job")
Result = TypeVar("Result")
Value = TypeVar("Value")

# How long a rank waits for the others, at the start and in a collective. In training all ranks work alike. Elsewhere it
# is the longest work of one rank alone: a part of at most 256 images, or the metrics of rank 0.
TRAINING, TIMEOUT = timedelta(minutes=10), timedelta(minutes=30)
COMPARED = 8  # images of a set by which processes find out whether theirs are the same
FROM_OTHERS = re.compile("gloo|env://|pair closure", re.IGNORECASE)  # in messages of torch.distributed without a class
SEEN_AFTER = 5.0  # seconds after which a new file is seen through any file system that nodes share

COUNTS = {  # environment variables in which launchers pass the number of processes
    "WORLD_SIZE": "torchrun",
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which is also set in a batch script that calls torchrun
}
BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # variables of Lightning, where no launcher starts the nodes
GLOO = "GLOO_SOCKET_IFNAME"  # environment variable with the name of an interface


@dataclass(frozen=True)
class Processes:
    """The process group of this program, seen from rank `rank` of `size`, which has `local_rank` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """True on rank 0, which gathers and writes the results."""
        return self.rank == 0

    @classmethod
    @contextmanager
    def launch(cls, timeout: timedelta | None = None, device: str | None = None) -> Iterator[Processes]:
        """Yield the process group of a script started by python, torchrun, accelerate launch or srun.

        It is destroyed when the context ends: others that wait for this process end, too.

        Args:
            timeout: how long a process waits for another one; None: TIMEOUT.
            device: name of the device that the user asked for, such as "cpu"; None: the GPU of this process, if any.
        """
        # torch.distributed.nn.functional keeps a reference to the group that exists at its import, which libraries do
        # at some time. That group and its threads would never end, and sometimes abort the process when Python exits.
        # So it is imported here, before there is a group.
        import torch.distributed.nn.functional

        keep_freed_memory()
        takes_gpu = device is None and torch.cuda.is_available()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        gpus = torch.cuda.device_count()
        if device is None and 0 < gpus < here:
            hint = f"start {gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES="
            raise UserError(f"{here} processes on a machine with {gpus} GPUs, but each needs one: {hint}")
        owned = find_launcher()[0] > 1 and not dist.is_initialized()
        if owned:
            set_variables()
            choose_interface(os.environ.get("MASTER_ADDR", ""))
            with others_needed():
                dist.init_process_group("gloo", timeout=timeout or TIMEOUT)  # for objects on the CPU
        try:
            processes = cls.current()
            if takes_gpu:
                torch.cuda.set_device(choose_gpu(processes.local_rank, gpus))
            yield processes
        finally:
            if owned:
                destroy_group()

    @classmethod
    def current(cls) -> Processes:
        """Return the current process group, or a single process if torch.distributed is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0
        return cls(dist.get_rank(), dist.get_world_size(), int(local_rank))

    def map_ordered(self, jobs: Sequence[Job], work: Callable[[Job], Result]) -> Iterator[Result]:
        """Yield `work(job)` for all `jobs`, computed `size` at a time, one on each rank.

        Rank 0 yields the results in the order of `jobs`. The other ranks yield nothing, but must exhaust the iterator.
        """
        for start in range(0, len(jobs), self.size):
            mine = start + self.rank
            result = None
            if mine < len(jobs):
                result = work(jobs[mine])
            yield from self._gather(result)[: len(jobs) - start]

    def _gather(self, mine: Result | None) -> list[Any]:
        """Return the results of all ranks on rank 0, and an empty list on the others."""
        if self.size == 1:
            return [mine]
        everyone = [None] * self.size if self.is_main else None
        with others_needed():
            dist.gather_object(mine, everyone, dst=0)
        return everyone or []

    def broadcast(self, value: Value) -> Value:
        """Broadcast the `value` of rank 0, a picklable object, to all ranks, and return it."""
        if self.size == 1:
            return value
        box = [value]
        with others_needed():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def check_same(self, what: str, value: object) -> None:
        """Raise a UserError on all ranks if `value`, called `what`, differs from rank 0's; all must call this."""
        found = self._gather((socket.gethostname(), value))
        problem = ""
        if self.is_main:
            problem = _describe_difference(what, found)
        problem = self.broadcast(problem)
        if problem:
            raise UserError(f"{problem}; give all nodes the same")

    def check_file(self, path: Path) -> None:
        """Raise a UserError on all ranks if the file, if it exists, has another content on another rank."""
        if self.size > 1:
            content = checksum(path) if path.is_file() else None
            self.check_same(str(path), content)

    def check_shared(self, folder: Path) -> None:
        """Raise a UserError on all ranks unless all see the same `folder`, which must exist; all must call this."""
        if self.size == 1:
            return
        trial = folder / self.broadcast(f".shared.{secrets.token_hex(4)}.partial")
        if self.is_main:
            with writing(folder):
                trial.touch()
        self.wait()
        end = time.monotonic() + SEEN_AFTER
        while not (seen := trial.exists()) and time.monotonic() < end:
            time.sleep(0.1)
        blind_host = None if seen else socket.gethostname()
        absent = [host for host in self._gather(blind_host) if host]
        trial.unlink(missing_ok=True)
        absent = self.broadcast(absent)
        if absent:
            raise UserError(f"{folder} on {absent[0]} is not the folder of process 0: name one that all nodes share")

    def wait(self) -> None:
        """Return when all ranks have called this."""
        if self.size > 1:
            with others_needed():
                dist.barrier()


def _describe_difference(what: str, found: Sequence[tuple[str, Any]]) -> str:
    """Return the last difference to rank 0 of (host, value) of all ranks, or an empty text if all are equal."""
    main_host, expected = found[0]
    problem = ""
    for rank, (host, value) in enumerate(found):
        if value == expected:
            continue
        name = ""
        if isinstance(value, dict):
            different = [key for key in value | expected if value.get(key) != expected.get(key)]
            name = f" {min(different)}"
        problem = f"{what}{name}: not the same on {host} (process {rank}) as on {main_host} (process 0)"
    return problem


def find_launcher() -> tuple[int, str]:
    """Return how many processes the launcher was asked for, and its name; (1, "python") if no launcher is found."""
    counts = []
    for key, launcher in COUNTS.items():
        count = os.environ.get(key, "")
        if count.isdecimal():
            counts.append((int(count), launcher))
    return max(counts, default=(1, "python"))


def set_variables() -> None:
    """Set the environment variables that torch.distributed reads for a task of srun; other launchers set them."""
    size, launcher = find_launcher()
    if launcher == "srun":
        job = os.environ.get("SLURM_JOB_ID", "")
        os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": str(size)}
        first_node, _ = _slurm_nodes()
        port = 12910  # this and the next are Lightning's ports
        if job.isdecimal():
            port = 15000 + int(job[-4:])
        os.environ.setdefault("MASTER_ADDR", first_node)
        os.environ.setdefault("MASTER_PORT", str(port))


def choose_interface(address: str) -> None:
    """Let gloo use the interface that leads to `address`, of rank 0, unless all are on one node or the user has chosen.

    By itself gloo takes the interface of the host's name. This is often loopback, on which other nodes do not find this
    process. Rank 0 may know its own name as loopback, too. Then the address of another node of SLURM is used.
    """
    if GLOO in os.environ or sys.platform != "linux":
        return
    for other in (address, *_slurm_nodes()[1:]):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # sends nothing
            own = probe.getsockname()[0]
            if not ip_address(own).is_loopback and (name := _interface(own)):
                os.environ[GLOO] = name
                return


def _interface(address: str) -> str | None:
    """Return the name of the interface with this address."""
    for name, own in psutil.net_if_addrs().items():
        if any(each.address == address for each in own):
            return name
    return None


def _slurm_nodes() -> list[str]:
    """Return the first and the last name in SLURM's list of nodes: gpu07 and gpu12 of gpu[07-09,12]; or loopback."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
    return [first, re.sub(r"\[[^\]]*?(\w+)\]", r"\1", nodes).split(",")[-1]]


@contextmanager
def others_needed() -> Iterator[None]:
    """Turn errors of torch.distributed in the body into a UserError: another process is missing or has ended."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not (isinstance(error, dist.DistError) or FROM_OTHERS.search(str(error))):
            raise
        raise UserError(f"another process has ended, or cannot be reached: {one_line(error)}") from error


def destroy_group() -> None:
    """Destroy gloo's process group, whose threads abort Python's exit now and then."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Limit torch to `count` CPU threads within the context; None changes nothing.

    More threads slow down small work, and another number changes the rounding of sums.
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_gpu(local_rank: int, visible: int) -> int:
    """Return the number of the GPU of this process, given how many GPUs it sees.

    Some launchers show each process a GPU of its own (`srun --gpus-per-task=1`): then that GPU has number 0.
    """
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise UserError(
            f"process {local_rank} of this machine (LOCAL_RANK) sees {visible} GPUs and needs one of its own; start "
            f"{visible} processes, or show each its own GPU with --gpus-per-task=1"
        )
    return local_rank


def pick_device(name: str | None, local_rank: int) -> torch.device:
    """Return the device `name`, otherwise the GPU of this process, otherwise the CPU; it is tried."""
    if name is None and torch.accelerator.is_available():
        gpu = choose_gpu(local_rank, torch.accelerator.device_count())
        name = f"{torch.accelerator.current_accelerator()}:{gpu}"
    name = name or "cpu"
    with explain(f"`device` {name}", RuntimeError, AssertionError, ImportError):
        tried = torch.zeros(1, device=name)
        tried.item()  # fails on the meta device
        return tried.device


def batches(count: int, batch_size: int, processes: int) -> list[range]:
    """Divide `range(count)` into consecutive batches, which do not depend on the number of processes.

    Only if there were fewer batches than processes are they smaller than `batch_size`.
    """
    size = max(1, min(batch_size, -(-count // processes)))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
