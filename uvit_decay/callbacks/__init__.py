"""Lightning callbacks and the run logger: EMA, previews, reconstructions, metrics, probes, checkpoints and logging."""

from uvit_decay.callbacks.best import BestCheckpoint
from uvit_decay.callbacks.branches import BranchNorms
from uvit_decay.callbacks.checkpoint import LastCheckpoint
from uvit_decay.callbacks.ema import EMA
from uvit_decay.callbacks.generation import GenerationMetrics
from uvit_decay.callbacks.previews import Preview, Reconstructions
from uvit_decay.callbacks.probe import LinearProbes
from uvit_decay.callbacks.progress import Progress
from uvit_decay.callbacks.summary import CPUThreads, Summary
from uvit_decay.runs.log import RunLogger

__all__ = [
    "EMA",
    "BestCheckpoint",
    "BranchNorms",
    "CPUThreads",
    "GenerationMetrics",
    "LastCheckpoint",
    "LinearProbes",
    "Preview",
    "Progress",
    "Reconstructions",
    "RunLogger",
    "Summary",
]
