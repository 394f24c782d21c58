"""A script of the project that waits less for other processes: python impatient.py PATIENCE=5 ... <script> ...

The names are constants of uvit_decay/runtime/meeting.py and lifelines.py.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    from uvit_decay.runtime import lifelines, meeting

    words = sys.argv[1:]
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        (module,) = [module for module in (lifelines, meeting) if name in vars(module)]
        setattr(module, name, type(vars(module)[name])(value))
    sys.path[0] = str(ROOT)
    sys.argv = [str(ROOT / words[0]), *words[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
