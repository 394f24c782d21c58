"""Representations: probes over layers and noise levels, and pictures of patch features."""
