"""Train a network, check a run before it starts, or measure the loss of a checkpoint.

    python train.py fit [--config configs/<experiment>.yaml] [--model.net.alpha_min 1.0] [--trainer.max_steps 500] ...
    python train.py doctor ...the flags of fit: check the machine, the nodes and the disks, and estimate time and memory
    python train.py validate [--config ...] --ckpt_path runs/.../last.ckpt

Without --config it is configs/digits.yaml, which trains on a CPU in minutes. Every setting of a config is a flag, and
all flags of Lightning's Trainer are there as --trainer.<flag>. The whole list: python train.py fit --help. Of a class:
python train.py fit --model.net.help uvit_decay.nn.UViT. What would run: python train.py fit ... --print_config. A class
that is not of this package, Lightning, torch.nn or torch.optim is allowed by --trust yours.Class. Flags are keys of
configs, with underscores; hyphens in their place are accepted.
"""

import sys
from pathlib import Path

from uvit_decay.runtime.command_line import respelled
from uvit_decay.runtime.errors import user_errors
from uvit_decay.runtime.signals import stoppable

DEFAULT_CONFIG = Path(__file__).resolve().parent / "configs" / "digits.yaml"


def main() -> None:
    """Run the command line, with configs/digits.yaml if it names no --config."""
    args = sys.argv[1:] = respelled(sys.argv[1:], "-", "_")
    if args in (["-h"], ["--help"]):
        print(__doc__)
        return
    from uvit_decay.doctor import CLI, COMMAND, Doctor  # imports Lightning, which takes seconds

    named = any(arg.partition("=")[0] in ("-c", "--config") for arg in args)
    if args and args[0] in (*CLI.subcommands(), COMMAND) and not named:
        sys.argv[2:2] = ["--config", str(DEFAULT_CONFIG)]
    (Doctor if args[:1] == [COMMAND] else CLI).run()


if __name__ == "__main__":
    with user_errors(), stoppable():
        main()
