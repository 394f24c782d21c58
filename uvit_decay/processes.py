"""One program on several processes: `python`, `torchrun` or `accelerate launch` start it, the first process gathers.

Results are those of one process, in the same order. A launcher that started fewer processes than it was asked for is
refused: `accelerate launch --num_processes 2 script.py` silently starts one where there is no second GPU.
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

from uvit_decay.errors import UserError, one_line

Job = TypeVar("Job")
Result = TypeVar("Result")
Thing = TypeVar("Thing")

PATIENCE = timedelta(days=7)  # an idle process waits for the slowest one: by default it would give up in 10 minutes
COUNTS = {  # what launchers tell the processes that they start
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which a batch script that calls torchrun has, too
}

# A command line, its words joined by NUL, that is `accelerate launch` in one of its spellings; and its arguments.
ACCELERATE = re.compile(
    r"(?:^|[/\\\0])(?:accelerate(?:_cli)?(?:\.exe|\.py)?\0launch|accelerate-launch(?:\.exe)?"
    r"|accelerate\.commands\.accelerate_cli\0launch|accelerate\.commands\.launch|accelerate/commands/launch\.py)\0(.+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Processes:
    """This process among those of the program: number `rank` of `size`, number `local_rank` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    owned: bool = False  # the process group is this object's to end

    @property
    def first(self) -> bool:
        """Whether this process gets the results, and writes them."""
        return self.rank == 0

    @classmethod
    def launched(cls, wanted: int | None = None) -> Processes:
        """Of a script, started by python, torchrun, accelerate launch or mpirun; they meet here.

        Args:
            wanted: so many there must be; None: as many as the launcher was asked for, where that can be found.

        Raises:
            UserError: they cannot meet, there are fewer, or not those that are wanted.
        """
        # Its defaults keep the process group that it finds when it is imported, which others do at some time. A group
        # so kept never ends, nor do its threads, and now and then they abort the process when Python exits.
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
    def joined(cls) -> Processes:
        """Of a program that has set up torch.distributed itself, or has not: then there is one."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0)))

    def in_order(self, jobs: Sequence[Job], work: Callable[[Job], Result]) -> Iterator[Result]:
        """`work` of all `jobs`, `size` of them at a time, one on each process.

        The first process gets the results in the order of `jobs`; the others get nothing, and must ask until the end.
        """
        for start in range(0, len(jobs), self.size):
            mine = start + self.rank
            result = work(jobs[mine]) if mine < len(jobs) else None
            yield from self._gathered(result)[: len(jobs) - start]

    def _gathered(self, mine: Result | None) -> list[Any]:
        """Every process's result, on the first process; none on the others."""
        if self.size == 1:
            return [mine]
        everyone = [None] * self.size if self.first else None
        with _others_alive():
            dist.gather_object(mine, everyone, dst=0)
        return everyone or []

    def share(self, thing: Thing) -> Thing:
        """The first process's `thing`, on all."""
        if self.size == 1:
            return thing
        box = [thing]
        with _others_alive():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def end(self) -> None:
        """Leave the process group, if `launched` made it."""
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
    """A process that waits for one that has ended ends, too, with a line; the cause is what the other one says."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"another process of this program may have ended: {one_line(error, 120)}") from error


def batches(count: int, batch_size: int, processes: int) -> list[range]:
    """The consecutive parts of `range(count)` that are worked on at a time, the same for any number of processes.

    Only where they would not all have work are the parts smaller.
    """
    size = max(1, min(batch_size, -(-count // processes)))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def asked_for() -> tuple[int, str]:
    """How many processes the launcher of this one was asked for, and its name; 1 if nothing says more."""
    told = [(int(os.environ[key]), name) for key, name in COUNTS.items() if os.environ.get(key, "").isdecimal()]
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ:
        told.append((_accelerate_was_asked_for(), "accelerate launch"))  # it tells one process nothing about others
    return max(told, default=(1, "python"), key=lambda pair: pair[0])


def _accelerate_was_asked_for() -> int:
    """--num_processes of the `accelerate launch` that this process descends from, or of its configuration file."""
    import psutil
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    for parent in psutil.Process().parents():
        try:
            found = ACCELERATE.search("\0".join(parent.cmdline()))
        except psutil.Error:  # it has ended, or is another user's
            continue
        if found:
            options, _ = launch_command_parser().parse_known_args(found[1].split("\0"))
            file = options.config_file or (None if options.cpu else default_config_file)
            if options.num_processes is None and file and Path(file).is_file():
                return load_config_from_file(file).num_processes or 1
            return options.num_processes or 1
    return 1
