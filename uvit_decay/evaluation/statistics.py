"""Files of reference statistics: mean and covariance of features, as pytorch-fid, U-ViT and ADM store them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from uvit_decay.disk import replacing
from uvit_decay.errors import UserError
from uvit_decay.evaluation import npz
from uvit_decay.metrics.features import Extractor
from uvit_decay.metrics.frechet import Statistics, check_statistics
from uvit_decay.plain import parse, typed

SPATIAL = 2023  # features of sFID
MOST_FEATURES, MOST_BYTES = 2**14, 2**24  # in a file; those of a known extractor are checked by their number
NAMES = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # ADM's


def save_statistics(path: Path, found: dict[str, Statistics], about: dict[str, Any]) -> None:
    """Write an .npz: `mu` (d,), `sigma` (d, d), float64, of "features"; `mu_s`, `sigma_s` of "spatial"; and `about`."""
    arrays: dict[str, np.ndarray] = {"about": np.array(json.dumps(about))}
    for kind, statistics in found.items():
        mean, cov = NAMES[kind]
        arrays |= {mean: statistics.mean.numpy(), cov: statistics.cov.numpy()}
    with replacing(path) as file:
        np.savez(file, **arrays)


class StatisticsFile:
    """Statistics that somebody has computed; `about` is empty where the file does not say of what."""

    def __init__(self, path: Path) -> None:
        self.path = path
        present = npz.names(path)
        self.has_pictures = "arr_0" in present
        self._arrays = {name: self._read(name) for pair in NAMES.values() for name in pair if name in present}
        self.about: dict[str, Any] = {}
        if "about" in present:
            if npz.header(path, "about").dtype.itemsize > MOST_BYTES:
                raise UserError(f"{path}: about is too long")
            about = parse(str(npz.read(path, "about")), f"{path}: about")
            self.about = typed(dict[str, object], about, f"{path}: about")
        for name, kind in {"extractor": str | None, "n": int | None}.items():
            typed(kind, self.about.get(name), f"{path}: about: {name}")

    def _read(self, name: str) -> np.ndarray:
        shape, _, dtype, _ = npz.header(self.path, name)
        wanted = "floating-point numbers" + (" (d, d)" if "sigma" in name else " (d,)")
        square = shape == ((len(shape) and shape[0]),) * (2 if "sigma" in name else 1)
        if not (np.issubdtype(dtype, np.floating) and square and max(shape) <= MOST_FEATURES):
            raise UserError(f"{self.path}: {name} must be {wanted}, it is {dtype} {shape}")
        return npz.read(self.path, name)

    def has(self, kind: str) -> bool:
        """Whether there are statistics of "features" or "spatial"."""
        return all(name in self._arrays for name in NAMES[kind])

    def check(self, extractor: Extractor) -> None:
        """Raise a UserError unless these are statistics of this extractor, as far as the file says, and can be any."""
        wanted, found = extractor.identity(), self.about.get("extractor")
        if found is not None and found != wanted:
            raise UserError(f"{self.path} has statistics of {found}, these features are of {wanted}")
        dims = {"features": extractor.dim, "spatial": SPATIAL}
        for kind, (mean, cov) in NAMES.items():
            if not self.has(kind):
                continue
            shapes = self._arrays[mean].shape, self._arrays[cov].shape
            if shapes != ((dims[kind],), (dims[kind], dims[kind])):
                found = f"{mean} {shapes[0]} and {cov} {shapes[1]}"
                raise UserError(f"{self.path} has statistics {found}, {extractor.name} gives {dims[kind]} features")
            found = self.statistics(kind)
            check_statistics(f"{self.path}: the statistics of {kind}", found)
            if found.cov.diagonal().min() < 0 or (found.n is not None and found.n < 2):
                raise UserError(f"{self.path}: the statistics of {kind} have variances below 0, or n below 2")

    def statistics(self, kind: str) -> Statistics:
        """Float64 mean and covariance."""
        mean, cov = (torch.from_numpy(self._arrays[name].astype(np.float64)) for name in NAMES[kind])
        return Statistics(mean, cov, self.about.get("n"))
