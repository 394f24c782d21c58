"""Files of reference statistics: mean and covariance of features, as pytorch-fid, U-ViT and ADM store them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from uvit_decay.disk import replacing
from uvit_decay.errors import UserError, one_line
from uvit_decay.metrics.features import Extractor
from uvit_decay.metrics.frechet import Statistics

SPATIAL = 2023  # features of sFID
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
        try:
            with np.load(path, allow_pickle=False) as members:
                self._arrays = {
                    name: members[name] for pair in NAMES.values() for name in pair if name in members.files
                }
                self.has_pictures = "arr_0" in members.files
                about = json.loads(str(members["about"])) if "about" in members.files else {}
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} cannot be read: {one_line(error)}") from error
        if not isinstance(about, dict):
            raise UserError(f"{path}: about is no JSON object")
        self.about: dict[str, Any] = about

    def has(self, kind: str) -> bool:
        """Whether there are statistics of "features" or "spatial"."""
        return all(name in self._arrays for name in NAMES[kind])

    def check(self, extractor: Extractor) -> None:
        """Raise a UserError unless these are statistics of this extractor, as far as the file says, and numbers."""
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
        for name, array in self._arrays.items():
            if not (np.issubdtype(array.dtype, np.number) and np.isfinite(array).all()):
                raise UserError(f"{self.path}: {name} holds NaN, infinity or no numbers")

    def statistics(self, kind: str) -> Statistics:
        """Float64 mean and covariance."""
        mean, cov = (torch.from_numpy(self._arrays[name].astype(np.float64)) for name in NAMES[kind])
        return Statistics(mean, cov, self.about.get("n"))
