"""Representations: probes over layers and noise levels, and figures of patch features."""
