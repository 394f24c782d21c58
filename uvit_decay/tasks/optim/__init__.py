"""Optimizers of tasks: their options, the table of their rules, learning rates, and clipping."""
