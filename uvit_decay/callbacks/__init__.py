"""Callbacks and the run folder: averaging, looking, judging, not losing anything."""

from uvit_decay.callbacks.ema import EMA
from uvit_decay.callbacks.generation import GenerationMetrics
from uvit_decay.callbacks.logger import RunLogger
from uvit_decay.callbacks.preview import Preview
from uvit_decay.callbacks.probe import LinearProbes
from uvit_decay.callbacks.safeguard import Safeguard
from uvit_decay.callbacks.summary import Summary

__all__ = ["EMA", "GenerationMetrics", "LinearProbes", "Preview", "RunLogger", "Safeguard", "Summary"]
