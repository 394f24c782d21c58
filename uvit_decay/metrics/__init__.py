"""Metrics on tensors: feature extractors, distances between features, Inception Score, precision and recall.

Does not import Lightning.
"""

from uvit_decay.metrics.dinov2 import DINOv2
from uvit_decay.metrics.extractors import Inception, SmallClassifier

__all__ = ["DINOv2", "Inception", "SmallClassifier"]
