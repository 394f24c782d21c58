"""Print the table of ratios and write them as JSON.

python -m benchmarks [--only GROUP ...] [--quick] [--compile] [--threads N] [--clock cpu] [--budget SECONDS]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import table
from benchmarks.cases import Row, Setting, rows
from uvit_decay.terminal.errors import UserError

# Modules with a function `cases`.
GROUPS = ("training", "additions", "sampling", "probes", "evaluation", "encoding", "loading")


def measured(group: str, setting: Setting) -> list[Row]:
    """Measure a group, and print its rows as they are found."""
    found = []
    for case in import_module(f"benchmarks.{group}").cases(setting):
        for row in rows(case, setting):
            print(table.row_line(row), flush=True)
            found.append(row)
        del case  # its networks, before the next ones are built
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the program in seconds")
    parser.add_argument("--compile", action="store_true", help="compiled networks, too; always on GPUs")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for one thread, beside others")
    parser.add_argument(
        "--budget",
        type=float,
        default=12.0,
        help="seconds after which a case starts no further round; default: %(default)s",
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench.json"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32, in convolutions too
    compiled = options.compile or (device.type == "cuda" and not options.quick)
    setting = Setting(device, options.quick, compiled, options.clock == "cpu", options.budget)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    print(table.head(setting), flush=True)
    found: dict[str, list[Row]] = {}
    for group in options.only:
        found[group] = measured(group, setting)
        table.write_json(options.json, setting, found)
    print(f"\n{time.perf_counter() - start:.0f} s; {options.json}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
