"""Runs side by side: learning curves and a table, from the histories in their folders."""

from uvit_decay.compare.report import compare

__all__ = ["compare"]
