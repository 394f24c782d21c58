"""Files of statistics, mean and covariance of features, and references, which are such files or stores of features."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uvit_decay.encoders.extractors import Extractor
from uvit_decay.evaluation import npz
from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.files.validation import as_type, parse
from uvit_decay.files.writing import replacing
from uvit_decay.metrics.frechet import Statistics
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types

NAMES = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # as in ADM's files


@check_types
def save_statistics(path: Path, statistics: dict[str, Statistics], metadata: dict[str, Any]) -> None:
    """Write an .npz: float64 `mu` (d,), `sigma` (d, d) of "features", `mu_s`, `sigma_s` of "spatial"; and `about`."""
    arrays: dict[str, np.ndarray] = {"about": np.array(json.dumps(metadata))}
    for kind, (mean, cov) in statistics.items():
        mean_name, cov_name = NAMES[kind]
        arrays[mean_name] = mean.numpy()
        arrays[cov_name] = cov.numpy()
    with replacing(path) as file:
        np.savez(file, **arrays)


class StatisticsFile:
    """A file of precomputed statistics; `metadata` is their recorded protocol, empty if the file has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        present = npz.names(path)
        self.has_images = "arr_0" in present
        self._arrays: dict[str, np.ndarray] = {}
        for pair in NAMES.values():
            for name in pair:
                if name in present:
                    self._arrays[name] = self._read(name)
        self.metadata: dict[str, Any] = {}
        if "about" in present:
            about = npz.read(path, "about", "text", lambda shape, dtype: shape == ())
            where = f"{path}: about"
            self.metadata = as_type(dict[str, object], parse(str(about), where), where)

    def _read(self, name: str) -> np.ndarray:
        """Return a mean, (d,), or a covariance, (d, d)."""
        rank, dimensions = 1, "d,"
        if "sigma" in name:
            rank, dimensions = 2, "d, d"

        def fits(shape: tuple[int, ...], dtype: np.dtype) -> bool:
            return dtype.kind == "f" and len(shape) == rank and len({*shape}) == 1

        return npz.read(self.path, name, f"floating-point numbers ({dimensions})", fits)

    def has(self, kind: str) -> bool:
        """Return whether there are statistics of `kind`, "features" or "spatial"."""
        return all(name in self._arrays for name in NAMES[kind])

    def check(self, extractor: Extractor) -> None:
        """Raise a UserError unless the statistics are finite and of this extractor, if the file records one."""
        ours = extractor.fingerprint()
        theirs = self.metadata.get("extractor")
        if theirs not in (None, ours):
            raise UserError(f"{self.path} has statistics of {theirs}: give statistics of {ours}")
        for kind, (mean, cov) in NAMES.items():
            if not self.has(kind) or kind not in extractor.widths:
                continue
            d = extractor.widths[kind]
            mean_shape = self._arrays[mean].shape
            cov_shape = self._arrays[cov].shape
            if mean_shape != (d,) or cov_shape != (d, d):
                actual = f"{mean} {mean_shape} and {cov} {cov_shape}"
                raise UserError(f"{self.path} has statistics {actual}, but {extractor.name} gives {d} features")
            for values in self.statistics(kind):
                if not values.isfinite().all():
                    raise UserError(f"{self.path}: the statistics of {kind} hold NaN or infinity")

    def statistics(self, kind: str) -> Statistics:
        """Return mean and covariance of `kind` in float64."""
        mean, cov = NAMES[kind]
        return Statistics(self._tensor(mean), self._tensor(cov))

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self._arrays[name].astype(np.float64))


@dataclass(frozen=True)
class Reference:
    """Reference of a comparison: a file of statistics, features of images, or both, as in ADM's files."""

    file: StatisticsFile | None
    store: FeatureStore | None

    def statistics(self, kind: str) -> Statistics:
        """Return mean and covariance of `kind`, from the file if it has them."""
        if self.file is not None and self.file.has(kind):
            return self.file.statistics(kind)
        return self.store.statistics(kind)

    def tensor(self, kind: str) -> Tensor:
        """Return the features `kind` of the reference images, (n, d)."""
        return self.store.tensor(kind)
