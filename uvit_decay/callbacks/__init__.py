"""Lightning callbacks and the run logger: EMA, previews, reconstructions, metrics, probes, checkpoints and logging."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "BestCheckpoint": "best",
    "BranchNorms": "branches",
    "LastCheckpoint": "last_checkpoint",
    "EMA": "ema",
    "GenerationMetrics": "generation_metrics",
    "Preview": "previews",
    "Reconstructions": "previews",
    "LinearProbes": "probe",
    "Progress": "progress",
    "CPUThreads": "threads",
    "Summary": "summary",
    "RunLogger": ".runs.log",  # configurations name it here
}
__all__ = list(MODULES)
# The first use of a name imports all modules, so that a search for subclasses of Callback finds them.
__getattr__, __dir__ = lazy(__name__, MODULES, together=True)
