"""On-disk cache of features, and files of statistics.

The cache is written in parts, so that interrupted programs resume; extract.py fills it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uvit_decay.evaluation import npz
from uvit_decay.metrics.extractors import Extractor, Features
from uvit_decay.metrics.frechet import Moments, Statistics, check_statistics
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home, check_writable, remove_remains, replacing, writing
from uvit_decay.runtime.tensor_files import load_tensors, save_tensors
from uvit_decay.runtime.validation import as_type, parse, read_json, write_json

FLOATS = Features._fields  # float32 (n, d)
ABOUT = "about.json"  # describes the store
OWNER = "whose"  # metadata key of a part: its first image and its store
PARTS_AT_ONCE = 24  # in statistics: one product of many rows is several times faster than many products
MOST_FEATURES = 2**14  # limits of a file of statistics, checked before reading; `check` compares the exact number
MOST_BYTES = 2**24
NAMES = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # as in ADM's files


class FeatureStore:
    """Tensors of n images, one file per part: `features`, float32 (n, d), and optional others.

    Only the first process opens, writes and reads it.

    Args:
        folder: folder without other files; None means a folder named by the hash of `metadata`, in
            $XDG_CACHE_HOME/uvit_decay/features or ~/.cache/uvit_decay/features.
        metadata: everything that the tensors depend on, as plain values.
        parts: consecutive ranges that together are range(n).
    """

    def __init__(self, folder: Path | None, metadata: dict[str, Any], parts: Sequence[range]) -> None:
        self.folder = folder or _cache_folder() / _hash_metadata(metadata)[:32]
        self.parts = list(parts)
        self.metadata = {**metadata, "parts": [part.stop for part in parts]}
        self._key = _hash_metadata(self.metadata)
        self._loaded: dict[str, Tensor] = {}
        self._verified: set[range] = set()

    def __len__(self) -> int:
        return self.parts[-1].stop

    @property
    def nfe(self) -> float:
        """Mean number of network evaluations per generated image; 0 for images that were read."""
        return float(self.tensor("calls").sum()) / len(self)

    @property
    def lock(self) -> Path:
        """Lock file of the program that fills the store."""
        return self.folder.with_name(self.folder.name + ".lock")

    def open(self) -> list[range]:
        """Create the folder, or resume from its parts; return the missing parts. The caller must hold `lock`.

        Existing parts are compared with their checksums. A damaged part is reported on stderr and counts as missing.

        Raises:
            UserError: the folder contains other files, or the features of another evaluation.
        """
        check_writable(self.folder, folder=True)
        remove_remains(self.folder)
        path = self.folder / ABOUT
        if not path.exists():
            visible = [other for other in self.folder.iterdir() if not other.name.startswith(".")]
            if visible:  # a crash leaves hidden files
                raise UserError(f"cannot store features in {self.folder}: the folder is not empty")
            write_json(path, self.metadata)
        if read_json(path, object) != json.loads(json.dumps(self.metadata)):
            raise UserError(
                f"cannot store features in {self.folder}: it has features of another evaluation; remove it, or name "
                "another --out"
            )
        return [part for part in self.parts if self._is_missing(part)]

    def _is_missing(self, part: range) -> bool:
        """Return whether a part must be extracted; report a damaged one on stderr."""
        if not self._file(part).exists():
            return True
        try:
            self._read(part)
        except UserError as error:
            print(f"{error}: it is extracted again", file=sys.stderr)
            return True
        return False

    def add(self, part: range, tensors: dict[str, Tensor]) -> None:
        """Write the tensors of a part.

        Args:
            part: range of the images.
            tensors: FLOATS of len(part) rows, `images` of at most len(part) rows, `calls` of one row.

        Raises:
            UserError: a tensor of FLOATS has another dtype or shape, or numbers that are not finite.
        """
        for name in tensors.keys() & FLOATS:
            _check_features(name, tensors[name], len(part))
        save_tensors(self._file(part), tensors, {OWNER: self._owner(part)})
        self._verified.add(part)

    def _owner(self, part: range) -> str:
        return f"{part.start} of {self._key}"

    def _read(self, part: range) -> dict[str, Tensor]:
        """Return the tensors of a part, verified at the first read."""
        path = self._file(part)
        metadata, tensors = load_tensors(path, verify=part not in self._verified)
        if metadata.get(OWNER) != self._owner(part):
            raise UserError(f"{path} is a part of an older version, of another store, or of other images of this store")
        self._verified.add(part)
        return tensors

    def _file(self, part: range) -> Path:
        return self.folder / f"{part.start:09d}.safetensors"

    def iterate(self, kind: str) -> Iterator[Tensor]:
        """Yield the tensor `kind` of each part that has one, in order.

        Raises:
            UserError: a damaged file; the next run extracts it again.
        """
        for part in self.parts:
            tensors = self._read(part)
            if kind in tensors:
                yield tensors[kind]

    def tensor(self, kind: str) -> Tensor:
        """Return all rows of `kind`, in order; they are read once and stay in memory."""
        if kind not in self._loaded:
            self._loaded[kind] = torch.cat(list(self.iterate(kind)))
        return self._loaded[kind]

    def statistics(self, kind: str = "features") -> Statistics:
        """Return mean and covariance of `features` or `spatial`, computed from sums in float64."""
        tensors = self.iterate(kind)
        moments: Moments | None = None
        while parts := list(islice(tensors, PARTS_AT_ONCE)):
            rows = torch.cat(parts)
            moments = moments or Moments(rows.shape[1], sync=False)
            moments.update(rows)
        return moments.compute()

    def remove(self) -> None:
        """Delete the folder and its lock.

        The description is deleted last, so that the next program resumes the deletion if this one is killed.
        """
        with writing(self.folder):
            for path in sorted(self.folder.iterdir(), key=lambda path: path.name == ABOUT):
                path.unlink()
            self.folder.rmdir()
            self.lock.unlink(missing_ok=True)


def _cache_folder() -> Path:
    """Return the folder of the stores of this machine."""
    return at_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "uvit_decay" / "features"


def _hash_metadata(metadata: dict[str, Any]) -> str:
    """Return the sha256 of plain values, independent of the order of keys."""
    text = json.dumps(metadata, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_features(name: str, features: Tensor, n: int) -> None:
    """Raise a UserError unless `features` are finite float32 numbers (n, d)."""
    shape = tuple(features.shape)
    fits = features.dtype == torch.float32 and len(shape) == 2 and shape[0] == n
    if not fits or not features.isfinite().all():
        raise UserError(f"{name} {features.dtype} {shape} of {n} images are not finite float32 numbers (n, d)")


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
            self.metadata = self._read_metadata()

    def _read(self, name: str) -> np.ndarray:
        """Return a mean, (d,), or a covariance, (d, d)."""
        rank = 2 if "sigma" in name else 1
        dimensions = "d, d" if rank == 2 else "d,"

        def fits(shape: tuple[int, ...], dtype: np.dtype) -> bool:
            return dtype.kind == "f" and len(shape) == rank and len({*shape}) == 1 and shape[0] <= MOST_FEATURES

        return npz.read(self.path, name, f"floating-point numbers ({dimensions})", fits)

    def _read_metadata(self) -> dict[str, Any]:
        def fits(shape: tuple[int, ...], dtype: np.dtype) -> bool:
            return shape == () and dtype.itemsize <= MOST_BYTES

        about = npz.read(self.path, "about", f"text of {MOST_BYTES} bytes at most", fits)
        where = f"{self.path}: about"
        return as_type(dict[str, object], parse(str(about), where), where)

    def has(self, kind: str) -> bool:
        """Return whether there are statistics of `kind`, "features" or "spatial"."""
        return all(name in self._arrays for name in NAMES[kind])

    def check(self, extractor: Extractor) -> None:
        """Raise a UserError unless the statistics are valid and of this extractor, if the file records one."""
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
            check_statistics(f"{self.path}: the statistics of {kind}", self.statistics(kind))

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
