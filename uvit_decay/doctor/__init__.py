"""Checks before a long run, which `train.py doctor` prints.

A check is a function of a `Run` that yields findings. Nothing is trained, and nothing is left on a disk.
"""

from uvit_decay.doctor.report import Finding, Report, Run

__all__ = ["Finding", "Report", "Run"]
