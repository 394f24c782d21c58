"""A program for several processes: python launched.py <jobs> <where it fails, or -> <result>."""

import json
import sys
from importlib import import_module
from pathlib import Path

from uvit_decay.runtime.distributed import Processes
from uvit_decay.terminal.errors import UserError, user_errors


def main(jobs: int, fails: str, result: Path) -> None:
    with Processes.launch() as processes:
        import_module("torch.distributed.nn.functional")  # as parts of torch do: it would keep the group

        def work(job: int) -> tuple[int, int]:
            if fails == f"job {job}":
                raise UserError(f"job {job} has failed")
            return job, processes.rank

        done = []
        for pair in processes.map_ordered(range(jobs), work):
            done.append(pair)
            if fails == f"result {pair[0]}":
                raise UserError(f"result {pair[0]} has failed")
        shared = processes.broadcast({"from": processes.rank})
        joined = Processes.current()
        seen = [processes.rank, processes.size, joined.rank, joined.size, joined.local_rank]
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    found = {"done": done, "shared": shared, "seen": seen, "threads": threads}
    result.with_suffix(f".{processes.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    with user_errors():
        main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
