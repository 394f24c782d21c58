"""Checks before a long run, which `train.py doctor` prints.

A check is a function of a `Plan` that yields findings. The network is not trained, and no files of the run are left.
"""

from uvit_decay.terminal.program import lazy

MODULES = {
    "Finding": "report",
    "Report": "report",
    "Plan": "report",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
