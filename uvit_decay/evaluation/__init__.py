"""Evaluation: image sources, cached features, metrics with their protocol, probes, comparisons of runs, reports."""
