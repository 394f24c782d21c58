"""Representations: probes over layers and noise levels."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "Probing": "probe_options",
    "Classification": "probe_options",
    "Prober": "probing",
    "Grid": "grid",
    "LayerTable": "grid",
    "Classifying": "classification",
    "PROTOCOLS": "probe_protocols",
    "Protocol": "probe_protocols",
    "GridProtocol": "probe_protocols",
    "PointProtocol": "probe_protocols",
    "Cells": "probe_protocols",
    "Outcome": "probe_protocols",
    "LinearProbe": "linear_probes",
    "logistic_grid": "logistic",
    "knn_accuracy": "knn",
    "effective_rank_exp": "rank",
    "spectrum_entropy": "rank",
    "mean_share": "rank",
    "noise_share": "noise",
    "NoiseShare": "noise",
    "NoiseTable": "noise",
    "measure_noise_share": "noise",
    "cknna": "reference",
    "TokenReader": "features",
    "Reconstructor": "reconstruction",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
