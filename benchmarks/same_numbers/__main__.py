"""Compare two checkouts bit for bit: the weights that they train, the pictures that they draw, the numbers they report.

    python -m benchmarks.same_numbers OLD_CHECKOUT NEW_CHECKOUT [--only ROW ...] [--out FOLDER]

Each row of `ROWS` (rows.py) is a command of train.py, sample.py or evaluate.py, or of kinds.py, which trains small
networks with each kind of shortcut. Both checkouts run it, each in its own folder and in one thread, with a given
precision and given numbers of images, so that the result depends on nothing that a machine chooses for itself. Commands
that read a checkpoint read the file that OLD wrote; the rows `resume` and `learned, resumed` continue OLD's runs from
their tenth step and compare with OLD's runs that were not stopped. Then the files of both sides are compared: all
tensors of checkpoints (weights, averages, optimizer moments), all pixels of pictures, and all numbers of tables except
times.

The table has a line for each row. The exit code is 1 if a row differs or fails. What OLD has already done in FOLDER is
not run again, unless its checkout has changes that are not committed. The program needs torch, numpy, PIL and PyYAML,
and nothing of uvit_decay. It takes about eight minutes on two cores.

Where a flag has another name in one of the checkouts, put it into `old` or `new` of its row.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.same_numbers.comparing import Comparison, compare_row
from benchmarks.same_numbers.rows import ROWS, Row
from benchmarks.same_numbers.running import describe, make_pictures, run_row


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows in both checkouts, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="checkout whose numbers are right, such as a git worktree")
    parser.add_argument("new", type=Path, help="checkout that is compared with it")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[row.name for row in ROWS], help="some of the rows")
    parser.add_argument("--out", type=Path, help="folder for the files of both sides; default: a temporary one")
    options = parser.parse_args(argv)
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    with TemporaryDirectory() as temporary:
        out = (options.out or Path(temporary)).resolve()
        return compare_checkouts(rows, options.old.resolve(), options.new.resolve(), out)


def compare_checkouts(rows: Sequence[Row], old: Path, new: Path, out: Path) -> int:
    """Run `rows` in both checkouts below the folder `out`, print a line for each, and return the exit code."""
    print(f"old {old} {describe(old)}\nnew {new} {describe(new)}\nfiles {out}\n", flush=True)
    shutil.rmtree(out / "new", ignore_errors=True)
    for side in ("old", "new"):
        make_pictures(out / side)
    same = True
    for row in rows:
        errors = run_row(row, old, new, out)
        found = {row.name: Comparison(differences=errors)} if errors else compare_row(row, out)
        for name, comparison in found.items():
            print_line(name, comparison)
            same = same and comparison.same
    return int(not same)


def print_line(name: str, comparison: Comparison) -> None:
    """Print a line of the table, and below it the first differences."""
    verdict = "same" if comparison.same else "DIFFERENT"
    print(f"{name:36} {comparison.values:>8} values  {verdict}", flush=True)
    for line in comparison.differences[:8]:
        print(f"    {line}", flush=True)
    if len(comparison.differences) > 8:
        print(f"    and {len(comparison.differences) - 8} more", flush=True)


if __name__ == "__main__":
    sys.exit(main())
