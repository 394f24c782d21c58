"""An older name of `uvit-decay encode`: python -m uvit_decay.data.latents encode."""

import sys

from uvit_decay.commands.encode import main

if __name__ == "__main__":
    main(sys.argv[1:])
