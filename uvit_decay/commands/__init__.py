"""Commands: train, sample, evaluate and the others of `uvit-decay`, one module each, on top of all others."""

__all__: list[str] = []  # programs, not functions to call
