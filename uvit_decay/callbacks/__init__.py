"""Lightning callbacks and the run logger: EMA, previews, metrics, probes, checkpoints and logging."""

from uvit_decay.callbacks.checkpoint import LastCheckpoint
from uvit_decay.callbacks.ema import EMA
from uvit_decay.callbacks.generation import GenerationMetrics
from uvit_decay.callbacks.logger import RunLogger
from uvit_decay.callbacks.preview import Preview
from uvit_decay.callbacks.probe import LinearProbes
from uvit_decay.callbacks.summary import Summary
from uvit_decay.callbacks.threads import CPUThreads

__all__ = [
    "EMA",
    "CPUThreads",
    "GenerationMetrics",
    "LastCheckpoint",
    "LinearProbes",
    "Preview",
    "RunLogger",
    "Summary",
]
