"""Train a network, or check a run: python train.py --help. The program is uvit_decay/commands/train/."""

import sys

from uvit_decay.commands.train import main

if __name__ == "__main__":
    main(sys.argv[1:])
