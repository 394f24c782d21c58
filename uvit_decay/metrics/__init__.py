"""Judgement on plain tensors: features, Frechet and kernel distances, Inception Score, neighbours, probes, rank.

Never imports Lightning.
"""

from uvit_decay.metrics.features import CustomExtractor, Inception, SmallClassifier

__all__ = ["CustomExtractor", "Inception", "SmallClassifier"]
