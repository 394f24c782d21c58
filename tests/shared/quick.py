"""A script of the project whose classifier of digits trains for 20 steps, not 300: python quick.py <script> ... ."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = (20,)  # the default of the constructor

if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # as if the script itself were started
    from uvit_decay.metrics import SmallClassifier

    SmallClassifier.__init__.__defaults__ = STEPS
    sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
