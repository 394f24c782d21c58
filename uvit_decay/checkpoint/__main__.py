"""An older name of `uvit-decay export` and `uvit-decay import`: python -m uvit_decay.checkpoint."""

import sys

from uvit_decay.commands.convert import main

if __name__ == "__main__":
    main(sys.argv[1:])
