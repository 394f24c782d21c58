"""Sample images from a checkpoint: python sample.py --help. The program is uvit_decay/scripts/sample.py."""

import sys

from uvit_decay.scripts.sample import main

if __name__ == "__main__":
    main(sys.argv[1:])
