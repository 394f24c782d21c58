"""An older name of `uvit-decay export` and `uvit-decay import`: python -m uvit_decay.checkpoint."""

import sys

from uvit_decay.commands.convert import main
from uvit_decay.runtime.errors import user_errors

if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
