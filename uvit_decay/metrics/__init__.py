"""Metrics on tensors: distances between features, Inception Score, precision and recall, label consistency.

Does not import Lightning.
"""

from uvit_decay.metrics.consistency import label_consistency

# Imported at once: some functions have the names of their modules, whose later import would hide the functions.
from uvit_decay.metrics.frechet import Moments, Statistics, frechet_distance
from uvit_decay.metrics.inception_score import inception_score
from uvit_decay.metrics.kid import kernel_distance
from uvit_decay.metrics.mind import mind
from uvit_decay.metrics.precision_recall import precision_recall

__all__ = [
    "Moments",
    "Statistics",
    "frechet_distance",
    "inception_score",
    "kernel_distance",
    "label_consistency",
    "mind",
    "precision_recall",
]
