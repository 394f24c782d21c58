"""The commands train, sample, evaluate and those of `uvit-decay`: one module each, on top of all others."""

__all__: list[str] = []  # programs, not functions to call
