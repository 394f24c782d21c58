"""Files of reference statistics: mean and covariance of features, in the formats of pytorch-fid, U-ViT and ADM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uvit_decay.evaluation import npz
from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.metrics.frechet import Statistics, check_statistics
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import replacing
from uvit_decay.runtime.plain import parse, typed

MOST_FEATURES, MOST_BYTES = 2**14, 2**24  # limits before reading; `check` compares with the exact number
NAMES = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # as in ADM's files


def save_statistics(path: Path, statistics: dict[str, Statistics], metadata: dict[str, Any]) -> None:
    """Write an .npz: float64 `mu` (d,), `sigma` (d, d) of "features", `mu_s`, `sigma_s` of "spatial"; and `about`."""
    arrays: dict[str, np.ndarray] = {"about": np.array(json.dumps(metadata))}
    for kind, (mean, cov, _) in statistics.items():
        arrays |= zip(NAMES[kind], (mean.numpy(), cov.numpy()), strict=True)
    with replacing(path) as file:
        np.savez(file, **arrays)


class StatisticsFile:
    """A file of precomputed statistics; `metadata` is their recorded protocol, empty if the file has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        present = npz.names(path)
        self.has_images = "arr_0" in present
        self._arrays = {name: self._read(name) for pair in NAMES.values() for name in pair if name in present}
        self.metadata: dict[str, Any] = {}
        if "about" in present:
            if npz.header(path, "about").dtype.itemsize > MOST_BYTES:
                raise UserError(f"{path}: about is too long")
            metadata = parse(str(npz.read(path, "about")), f"{path}: about")
            self.metadata = typed(dict[str, object], metadata, f"{path}: about")
        for name, kind in {"extractor": str | None, "n": int | None}.items():
            typed(kind, self.metadata.get(name), f"{path}: about: {name}")

    def _read(self, name: str) -> np.ndarray:
        shape, _, dtype, _ = npz.header(self.path, name)
        expected = "floating-point numbers" + (" (d, d)" if "sigma" in name else " (d,)")
        square = shape == ((len(shape) and shape[0]),) * (2 if "sigma" in name else 1)
        if not (np.issubdtype(dtype, np.floating) and square and max(shape) <= MOST_FEATURES):
            raise UserError(f"{self.path}: {name} must be {expected}, it is {dtype} {shape}")
        return npz.read(self.path, name)

    def has(self, kind: str) -> bool:
        """Return whether there are statistics of `kind`, "features" or "spatial"."""
        return all(name in self._arrays for name in NAMES[kind])

    def check(self, extractor: Extractor) -> None:
        """Raise a UserError unless these are valid statistics, of this extractor as far as the file records it."""
        ours, theirs = extractor.fingerprint(), self.metadata.get("extractor")
        if theirs not in (None, ours):
            raise UserError(f"{self.path} has statistics of {theirs}, these features are of {ours}")
        for kind, (mean, cov) in NAMES.items():
            if not self.has(kind) or kind not in extractor.widths:
                continue
            d, shapes = extractor.widths[kind], (self._arrays[mean].shape, self._arrays[cov].shape)
            if shapes != ((d,), (d, d)):
                actual = f"{mean} {shapes[0]} and {cov} {shapes[1]}"
                raise UserError(f"{self.path} has statistics {actual}, {extractor.name} gives {d} features")
            statistics = self.statistics(kind)
            check_statistics(f"{self.path}: the statistics of {kind}", statistics)
            if statistics.cov.diagonal().min() < 0 or (statistics.n is not None and statistics.n < 2):
                raise UserError(f"{self.path}: the statistics of {kind} have variances below 0, or n below 2")

    def statistics(self, kind: str) -> Statistics:
        """Return mean and covariance of `kind` in float64."""
        mean, cov = (torch.from_numpy(self._arrays[name].astype(np.float64)) for name in NAMES[kind])
        return Statistics(mean, cov, self.metadata.get("n"))


@dataclass(frozen=True)
class Reference:
    """The reference of a comparison: a file of statistics, features of images, or both, as in ADM's files."""

    file: StatisticsFile | None
    store: FeatureStore | None

    def statistics(self, kind: str) -> Statistics:
        """Return mean and covariance of `kind`, from the file if it has them."""
        return self.file.statistics(kind) if self.file and self.file.has(kind) else self.store.statistics(kind)

    def tensor(self, kind: str) -> Tensor:
        """Return the features `kind` of the reference images, (n, d)."""
        return self.store.tensor(kind)
