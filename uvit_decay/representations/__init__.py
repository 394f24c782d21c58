"""Representations: probes over layers and noise levels."""

from uvit_decay.runtime.program import lazy

MODULES = {
    "Probing": "options",
    "Classification": "options",
    "Prober": "probing",
    "Grid": "grid",
    "Classifying": "classification",
    "PROTOCOLS": "protocols",
    "Protocol": "protocols",
    "GridProtocol": "protocols",
    "PointProtocol": "protocols",
    "Cells": "recipes",
    "Outcome": "recipes",
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
