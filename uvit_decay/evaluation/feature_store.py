"""On-disk cache of extracted features, written in parts so that interrupted runs resume; extract.py fills it."""

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
from uvit_decay.runtime.validation import parse, read_json, typed, write_json

FLOATS = Features._fields  # float32 (n, d)
ABOUT = "about.json"  # describes the store
OWNER = "whose"  # metadata key of a part: its place and its store
PARTS_AT_ONCE = 24  # in statistics: one product of many rows is several times faster than many products


class FeatureStore:
    """Tensors of n images, one file per part: `features`, float32 (n, d), and optional others.

    Only the first process opens, writes and reads it.

    Args:
        folder: folder with nothing else in it; None means one named by the hash of `metadata`, in
            $XDG_CACHE_HOME/uvit_decay/features, else ~/.cache/uvit_decay/features.
        metadata: everything that the tensors depend on, as plain values.
        parts: consecutive ranges that together are range(n).
    """

    def __init__(self, folder: Path | None, metadata: dict[str, Any], parts: Sequence[range]) -> None:
        cache = at_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "uvit_decay" / "features"
        self.folder = folder or cache / _sha256(metadata)[:32]
        self.metadata, self.parts = {**metadata, "parts": [part.stop for part in parts]}, list(parts)
        self._key = _sha256(self.metadata)
        self._loaded: dict[str, Tensor] = {}
        self._verified: set[range] = set()

    def __len__(self) -> int:
        return self.parts[-1].stop

    @property
    def nfe(self) -> float:
        """Network evaluations that generated an image, on average; 0 for images that were read."""
        return float(self.tensor("calls").sum()) / len(self)

    @property
    def lock(self) -> Path:
        """Lock file, held by the program that fills the store."""
        return self.folder.with_name(self.folder.name + ".lock")

    def open(self) -> list[range]:
        """Create the folder, or resume from its parts; return the parts that are missing. Its lock must be held.

        Existing parts are compared with their checksums; a damaged one is reported on stderr and counts as missing.
        """
        check_writable(self.folder, folder=True)
        remove_remains(self.folder)
        path = self.folder / ABOUT
        if not path.exists():
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):  # a crash leaves hidden files
                raise UserError(f"{self.folder} is in the way: features are to be kept there, and it is not empty")
            write_json(path, self.metadata)
        if read_json(path, object) != json.loads(json.dumps(self.metadata)):
            raise UserError(f"{self.folder} keeps the features of another evaluation: remove it, or name another --out")
        return [part for part in self.parts if not self._file(part).exists() or not self._is_whole(part)]

    def _is_whole(self, part: range) -> bool:
        try:
            self._read(part)
        except UserError as error:
            print(f"{error}: it is extracted again", file=sys.stderr)
            return False
        return True

    def add(self, part: range, tensors: dict[str, Tensor]) -> None:
        """Write the tensors of a part: FLOATS of len(part) rows, `images` of at most as many, `calls` of one."""
        for name in tensors.keys() & FLOATS:
            dtype, shape = tensors[name].dtype, tuple(tensors[name].shape)
            if (dtype, len(shape), shape[:1]) != (torch.float32, 2, (len(part),)) or not tensors[name].isfinite().all():
                raise UserError(f"{name} {dtype} {shape} of {len(part)} images are not finite float32 numbers (n, d)")
        save_tensors(self._file(part), tensors, {OWNER: self._owner(part)})
        self._verified.add(part)

    def _owner(self, part: range) -> str:
        return f"{part.start} of {self._key}"

    def _read(self, part: range) -> dict[str, Tensor]:
        """Return the tensors of a part, verified at the first read."""
        path, known = self._file(part), part in self._verified
        metadata, tensors = load_tensors(path, verify=not known)
        if metadata.get(OWNER) != self._owner(part):
            raise UserError(f"{path} is of an older version, of another store, or of other images of this one")
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
        """Return all rows of `kind`, in order; they are read once and kept in memory."""
        if kind not in self._loaded:
            self._loaded[kind] = torch.cat(list(self.iterate(kind)))
        return self._loaded[kind]

    def statistics(self, kind: str = "features") -> Statistics:
        """Return mean and covariance of `features` or `spatial`, from sums in float64."""
        tensors = self.iterate(kind)
        moments: Moments | None = None
        while parts := list(islice(tensors, PARTS_AT_ONCE)):
            rows = torch.cat(parts)
            moments = moments or Moments(rows.shape[1], sync=False)
            moments.update(rows)
        return moments.compute()

    def remove(self) -> None:
        """Delete the folder and its lock; the description goes last, so that a killed program does this again."""
        with writing(self.folder):
            for path in sorted(self.folder.iterdir(), key=lambda path: path.name == ABOUT):
                path.unlink()
            self.folder.rmdir()
            self.lock.unlink(missing_ok=True)


def _sha256(metadata: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


MOST_FEATURES, MOST_BYTES = 2**14, 2**24  # limits before reading; `check` compares with the exact number
NAMES = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # as in ADM's files


def save_statistics(path: Path, statistics: dict[str, Statistics], metadata: dict[str, Any]) -> None:
    """Write an .npz: float64 `mu` (d,), `sigma` (d, d) of "features", `mu_s`, `sigma_s` of "spatial"; and `about`."""
    arrays: dict[str, np.ndarray] = {"about": np.array(json.dumps(metadata))}
    for kind, (mean, cov) in statistics.items():
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
            text = f"text of {MOST_BYTES} bytes at most"
            about = npz.read(path, "about", text, lambda shape, dtype: shape == () and dtype.itemsize <= MOST_BYTES)
            self.metadata = typed(dict[str, object], parse(str(about), f"{path}: about"), f"{path}: about")

    def _read(self, name: str) -> np.ndarray:
        rank = 2 if "sigma" in name else 1

        def fits(shape: tuple[int, ...], dtype: np.dtype) -> bool:
            return dtype.kind == "f" and len(shape) == rank and len({*shape}) == 1 and shape[0] <= MOST_FEATURES

        return npz.read(self.path, name, f"floating-point numbers ({'d, d' if rank == 2 else 'd,'})", fits)

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
            check_statistics(f"{self.path}: the statistics of {kind}", self.statistics(kind))

    def statistics(self, kind: str) -> Statistics:
        """Return mean and covariance of `kind` in float64."""
        return Statistics(*(torch.from_numpy(self._arrays[name].astype(np.float64)) for name in NAMES[kind]))


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
