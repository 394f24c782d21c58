"""Evaluate images and checkpoints: python evaluate.py --help. The program is uvit_decay/commands/evaluate.py."""

import sys

from uvit_decay.commands.evaluate import main

if __name__ == "__main__":
    main(sys.argv[1:])
