"""python -m uvit_decay.compare compare RUN RUN ... [--by alpha_min] [--x step|epoch|images] [--out compare.png]"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from uvit_decay.compare import report as compare
from uvit_decay.runtime.errors import UserError, user_errors
from uvit_decay.runtime.files import check_writable

PICTURES = (".png", ".pdf", ".svg")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m uvit_decay.evaluation", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    command = commands.add_parser("compare", help="learning curves and a table of any set of runs, seeds averaged")
    command.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="a run folder, such as runs/digits/version_0"
    )
    command.add_argument("--by", default="alpha_min", help="an option, such as net.schedule; default: alpha_min")
    command.add_argument("--x", choices=get_args(compare.X), help="of the curves; default: epoch where the logs tell")
    command.add_argument("--out", type=Path, default=Path("compare.png"), help="default: compare.png; a .csv beside it")
    return parser


def main(args: Sequence[str]) -> None:
    """Compare runs as `args` ask: write a figure and a CSV, print the table, its notes and remarks."""
    options = _parser().parse_args(args)
    out, by = options.out, options.by
    if out.suffix not in PICTURES:
        raise UserError(f"--out {out}: the figure is a {', '.join(PICTURES)}")
    check_writable(out)
    runs = compare.read_runs(options.runs)
    name = compare.option(runs, by)
    x = compare.axis(runs, options.x)
    groups = compare.grouped(runs, name)
    table = compare.rows(groups)
    compare.save_csv(out.with_suffix(".csv"), by, table)
    compare.save_figure(out, by, groups, x)
    print(f"{compare.markdown(by, table)}\n\n{compare.notes(runs)}")
    for remark in compare.remarks(runs, name):
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {out.with_suffix('.csv').name}")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
