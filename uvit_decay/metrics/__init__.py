"""Metrics on tensors: feature extractors, distances between features, Inception Score, precision and recall.

Does not import Lightning.
"""

from uvit_decay.metrics.consistency import label_consistency

# Imported at once: some functions have the names of their modules, whose later import would hide the functions.
from uvit_decay.metrics.dinov2 import DINOv2
from uvit_decay.metrics.extractors import Extractor, Features, Inception, TrainedExtractor
from uvit_decay.metrics.frechet import Moments, Statistics, frechet_distance
from uvit_decay.metrics.inception_score import inception_score
from uvit_decay.metrics.kid import kernel_distance
from uvit_decay.metrics.mind import mind
from uvit_decay.metrics.precision_recall import precision_recall
from uvit_decay.metrics.small_classifier import SmallClassifier

__all__ = [
    "DINOv2",
    "Extractor",
    "Features",
    "Inception",
    "Moments",
    "SmallClassifier",
    "Statistics",
    "TrainedExtractor",
    "frechet_distance",
    "inception_score",
    "kernel_distance",
    "label_consistency",
    "mind",
    "precision_recall",
]
