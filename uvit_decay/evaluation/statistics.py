"""Files of reference statistics: mean and covariance of features, in the formats of pytorch-fid, U-ViT and ADM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from uvit_decay.evaluation import npz
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.metrics.frechet import Statistics, check_statistics
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import replacing
from uvit_decay.runtime.plain import parse, typed

SPATIAL = 2023  # number of features of sFID
MOST_FEATURES, MOST_BYTES = 2**14, 2**24  # limits before reading; `check` compares with the exact number
NAMES = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # as in ADM's files


def save_statistics(path: Path, found: dict[str, Statistics], about: dict[str, Any]) -> None:
    """Write an .npz: float64 `mu` (d,), `sigma` (d, d) of "features", `mu_s`, `sigma_s` of "spatial"; and `about`."""
    arrays: dict[str, np.ndarray] = {"about": np.array(json.dumps(about))}
    for kind, statistics in found.items():
        mean, cov = NAMES[kind]
        arrays |= {mean: statistics.mean.numpy(), cov: statistics.cov.numpy()}
    with replacing(path) as file:
        np.savez(file, **arrays)


class StatisticsFile:
    """A file of precomputed statistics; `about` is their recorded protocol, empty if the file has none.

    Raises:
        UserError: a file that cannot be read, or arrays of wrong kinds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        present = npz.names(path)
        self.has_images = "arr_0" in present
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
        """Return whether there are statistics of `kind`, "features" or "spatial"."""
        return all(name in self._arrays for name in NAMES[kind])

    def check(self, extractor: Extractor) -> None:
        """Raise a UserError unless these are valid statistics, of this extractor as far as the file records it."""
        wanted, found = extractor.fingerprint(), self.about.get("extractor")
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
        """Return mean and covariance of `kind` in float64."""
        mean, cov = (torch.from_numpy(self._arrays[name].astype(np.float64)) for name in NAMES[kind])
        return Statistics(mean, cov, self.about.get("n"))
