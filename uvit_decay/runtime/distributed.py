"""Programs on several processes, started by `torchrun`, `accelerate launch` or `mpirun`; rank 0 gathers the results.

Results are the same, in the same order, as on one process. It is an error if the launcher has started fewer processes
than it was asked for: `accelerate launch --num_processes 2 script.py` silently starts one if there is no second GPU.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from uvit_decay.runtime.errors import UserError, one_line

Job = TypeVar("Job")
Result = TypeVar("Result")
Thing = TypeVar("Thing")

PATIENCE = timedelta(days=7)  # timeout of an idle rank that waits for the slowest one; the default is 10 minutes
COUNTS = {  # environment variables in which launchers pass the number of processes
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which is also set in a batch script that calls torchrun
}

# Matches the command line of `accelerate launch` in any of its spellings, with words joined by NUL; the group holds its
# arguments.
ACCELERATE = re.compile(
    r"(?:^|[/\\\0])(?:accelerate(?:_cli)?(?:\.exe|\.py)?\0launch|accelerate-launch(?:\.exe)?"
    r"|accelerate\.commands\.accelerate_cli\0launch|accelerate\.commands\.launch|accelerate/commands/launch\.py)\0(.+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Processes:
    """The process group of this program, seen from rank `rank` of `size`, which has `local_rank` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    owned: bool = False  # `launched` initialised the process group, and `end` destroys it

    @property
    def is_main(self) -> bool:
        """True on rank 0, which gathers and writes the results."""
        return self.rank == 0

    @classmethod
    def launched(cls, wanted: int | None = None) -> Processes:
        """Initialise the process group of a script started by python, torchrun, accelerate launch or mpirun.

        Args:
            wanted: required number of processes; None: at least as many as the launcher was asked for, if it is known.

        Raises:
            UserError: the process group cannot be initialised or has another number of processes, or there are more
                processes than GPUs on this machine.
        """
        # torch.distributed.nn.functional keeps a reference to the group that exists at its import, which libraries do
        # at some time. That group and its threads would never end, and sometimes abort the process when Python exits.
        # So it is imported here, before there is a group.
        import torch.distributed.nn.functional
        from accelerate import PartialState

        owned = not dist.is_initialized()
        try:
            state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"the processes of this program cannot meet: {one_line(error)}") from error
        found = cls(state.process_index, state.num_processes, state.local_process_index, owned)
        try:
            found._check(wanted)
        except UserError:
            found.end()
            raise
        return found

    @classmethod
    def current(cls) -> Processes:
        """Return the current process group, or a single process if torch.distributed is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0)))

    def map_ordered(self, jobs: Sequence[Job], work: Callable[[Job], Result]) -> Iterator[Result]:
        """Yield `work(job)` for all `jobs`, computed `size` at a time, one on each rank.

        Rank 0 yields the results in the order of `jobs`. The other ranks yield nothing, but must exhaust the iterator.
        """
        for start in range(0, len(jobs), self.size):
            mine = start + self.rank
            result = work(jobs[mine]) if mine < len(jobs) else None
            yield from self._gathered(result)[: len(jobs) - start]

    def _gathered(self, mine: Result | None) -> list[Any]:
        """Return the results of all ranks on rank 0, and an empty list on the others."""
        if self.size == 1:
            return [mine]
        everyone = [None] * self.size if self.is_main else None
        with _others_alive():
            dist.gather_object(mine, everyone, dst=0)
        return everyone or []

    def broadcast(self, thing: Thing) -> Thing:
        """Broadcast the `thing` of rank 0, a picklable object, to all ranks, and return it."""
        if self.size == 1:
            return thing
        box = [thing]
        with _others_alive():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def end(self) -> None:
        """Destroy the process group if `launched` initialised it."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()

    def _check(self, wanted: int | None) -> None:
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if 0 < gpus < here:
            mend = f"start {gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES="
            raise UserError(
                f"{here} processes on a machine with {gpus} GPUs would wait for each other for ever: {mend}"
            )
        asked, launcher = (wanted, "--processes") if wanted else asked_for()
        if self.size < asked or (wanted and self.size != wanted):
            script = Path(sys.argv[0]).name
            lines = f"`torchrun --nproc_per_node {asked} -- {script} ...` or `accelerate launch --multi_gpu "
            lines += f"--num_processes {asked} --num_machines 1 --mixed_precision no --dynamo_backend no {script} ...`"
            mend = f"start it with {lines}, even without GPUs" if asked > 1 else "start it with python"
            raise UserError(f"{launcher} asks for {asked} processes, but this program has {self.size}: {mend}")


@contextmanager
def _others_alive() -> Iterator[None]:
    """Turn a failed collective into a UserError; the rank that ended has printed the cause."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"another process of this program may have ended: {one_line(error, 120)}") from error


def batches(count: int, batch_size: int, processes: int) -> list[range]:
    """Divide `range(count)` into consecutive batches, which do not depend on the number of processes.

    Only if there were fewer batches than processes are they smaller than `batch_size`.
    """
    size = max(1, min(batch_size, -(-count // processes)))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def asked_for() -> tuple[int, str]:
    """Return how many processes the launcher was asked for, and its name; (1, "python") if no launcher is found."""
    told = [(int(os.environ[key]), name) for key, name in COUNTS.items() if os.environ.get(key, "").isdecimal()]
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ:
        told.append((_accelerate_was_asked_for(), "accelerate launch"))  # it passes no number to a single process
    return max(told, default=(1, "python"), key=lambda pair: pair[0])


def _accelerate_was_asked_for() -> int:
    """Return --num_processes of the `accelerate launch` above this process, or of its configuration file, or 1.

    A single process that it starts has no environment variable with the number, so its command line is read.
    """
    import psutil
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    for parent in psutil.Process().parents():  # another process, such as a shell, may be in between
        try:
            found = ACCELERATE.search("\0".join(parent.cmdline()))
        except psutil.Error:  # the parent has ended, or belongs to another user
            continue
        if found:
            # accelerate's parser understands all spellings of its options. The flag wins over the configuration file,
            # which is the default one if none is named and the CPU is not asked for.
            options, _ = launch_command_parser().parse_known_args(found[1].split("\0"))
            file = options.config_file or (None if options.cpu else default_config_file)
            if options.num_processes is None and file and Path(file).is_file():
                return load_config_from_file(file).num_processes or 1
            return options.num_processes or 1
    return 1
