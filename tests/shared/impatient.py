"""A script of the project that waits less for other processes: python impatient.py <seconds> <script> ..."""

import runpy
import sys
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    from uvit_decay.runtime import distributed

    distributed.TIMEOUT = timedelta(seconds=float(sys.argv[1]))
    sys.path[0] = str(ROOT)
    sys.argv = [str(ROOT / sys.argv[2]), *sys.argv[3:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
