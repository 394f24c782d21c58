"""A program on several processes, for tests: python launched.py <jobs> <where it fails, or -> <result>."""

import json
import sys
from pathlib import Path

from uvit_decay.errors import UserError, user_errors
from uvit_decay.processes import Processes


def main(jobs: int, fails: str, result: Path) -> None:
    processes = Processes.launched()

    def work(job: int) -> tuple[int, int]:
        if fails == f"job {job}":
            raise UserError(f"job {job} has failed")
        return job, processes.rank

    done = []
    for pair in processes.in_order(range(jobs), work):
        done.append(pair)
        if fails == f"result {pair[0]}":
            raise UserError(f"result {pair[0]} has failed")
    shared = processes.share({"from": processes.rank})
    joined = Processes.joined()
    seen = [processes.rank, processes.size, joined.rank, joined.size, joined.local_rank]
    result.with_suffix(f".{processes.rank}").write_text(json.dumps({"done": done, "shared": shared, "seen": seen}))
    processes.end()


if __name__ == "__main__":
    with user_errors():
        main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
