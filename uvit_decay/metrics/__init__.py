"""Metrics on tensors: feature extractors, Frechet and kernel distances, Inception Score, precision and recall.

Does not import Lightning.
"""

from uvit_decay.metrics.extractors import CustomExtractor, Inception, SmallClassifier

__all__ = ["CustomExtractor", "Inception", "SmallClassifier"]
