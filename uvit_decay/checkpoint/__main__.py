"""Exports this project's checkpoints, and imports official files of U-ViT, SiT and MAE."""

import sys
from collections.abc import Sequence

from uvit_decay.checkpoint.convert import export, import_official
from uvit_decay.runtime.command_line import parse
from uvit_decay.runtime.errors import user_errors
from uvit_decay.runtime.program import PROGRAM, from_package


def main(args: Sequence[str]) -> None:
    """Run the command that `args` name and print what was written."""
    commands = {"export": export, "import": import_official}
    call = parse(commands, args, __doc__, PROGRAM if from_package() else "python -m uvit_decay.checkpoint")
    if note := call():
        print(note)
    target = call.keywords["target"]
    print(f"wrote {target} ({target.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
