"""The commands train, sample, evaluate and those of `uvit-decay`: one module each, on top of all others."""
