"""Samples of a network: their options, how they are generated, the files that hold them, and guides."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "LoadingOptions": "options",
    "SamplingOptions": "options",
    "Samples": "samples",
    "write_samples": "files",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
