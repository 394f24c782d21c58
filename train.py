"""Train a network: python train.py fit [--config configs/<experiment>.yaml] [--model.net.alpha_min 1.0] ...

Without --config it trains configs/digits.yaml, on the CPU in minutes. All flags of Lightning's Trainer are there as
--trainer.<flag>; `python train.py fit --help` lists the rest.
"""

import sys
from pathlib import Path

from uvit_decay.errors import user_errors

DEFAULT_CONFIG = Path(__file__).resolve().parent / "configs" / "digits.yaml"


def main() -> None:
    from uvit_decay.cli import CLI  # imports Lightning: seconds

    args = sys.argv[1:]
    named = any(arg.partition("=")[0] in ("-c", "--config") for arg in args)
    if args and args[0] in CLI.subcommands() and not named:
        sys.argv[2:2] = ["--config", str(DEFAULT_CONFIG)]
    CLI.run()


if __name__ == "__main__":
    with user_errors():
        main()
