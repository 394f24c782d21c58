"""What users meet: errors of one line, checked arguments, command lines, progress."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "UserError": "errors",
    "RunEnded": "errors",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
