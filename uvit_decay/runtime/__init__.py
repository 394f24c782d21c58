"""Numerics and processes: random numbers, precision, optimizers, threads, signals, several processes."""

from uvit_decay.terminal.program import lazy

MODULES = {"Processes": "distributed"}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
