"""What all subpackages stand on: errors, files, processes, random numbers, precision."""

from uvit_decay.runtime.program import lazy

MODULES = {
    "UserError": "errors",
    "RunEnded": "errors",
    "Processes": "distributed",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
