"""Sample images from a checkpoint: python sample.py --help. The program is uvit_decay/commands/sample.py."""

import sys

from uvit_decay.commands.sample import main

if __name__ == "__main__":
    main(sys.argv[1:])
