"""Comparison of two checkouts, bit for bit; `python -m benchmarks.same_numbers` is the program."""
