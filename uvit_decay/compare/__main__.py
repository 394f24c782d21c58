"""python -m uvit_decay.compare compare RUN RUN ... [--by alpha_min] [--x step|epoch|images] [--out compare.png]"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from uvit_decay.compare.report import X, compare
from uvit_decay.runtime.errors import user_errors


def main(args: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m uvit_decay.compare")
    command = parser.add_subparsers(required=True, metavar="command").add_parser("compare", help="compare runs")
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run folder: runs/digits/version_0")
    command.add_argument("--by", default="alpha_min", help="an option, such as net.schedule; default: alpha_min")
    command.add_argument("--x", choices=get_args(X), default="epoch", help="of the curves; default: epoch")
    command.add_argument("--out", type=Path, default=Path("compare.png"), help="default: compare.png; a .csv beside it")
    compare(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
