"""On-disk cache of features, written in parts, so that interrupted programs resume; extract.py fills it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.encoders.extractors import Features
from uvit_decay.evaluation.extractor_cache import hash_metadata
from uvit_decay.files.tensor_files import load_tensors, save_tensors
from uvit_decay.files.validation import read_json, write_json
from uvit_decay.files.writing import cache_folder, check_writable, remove_remains, writing
from uvit_decay.metrics.frechet import Moments, Statistics
from uvit_decay.terminal.errors import UserError

FLOATS = Features._fields  # float32 (n, d)
ABOUT = "about.json"  # describes the store
OWNER = "whose"  # metadata key of a part: its first image and its store
PARTS_AT_ONCE = 24  # in statistics: one product of many rows is several times faster than many products


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
        self.folder = folder or cache_folder("features") / hash_metadata(metadata)[:32]
        self.parts = list(parts)
        self.metadata = {**metadata, "parts": [part.stop for part in parts]}
        self._key = hash_metadata(self.metadata)
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
        A folder with other files, or with the features of another evaluation or of files that have changed, is refused.
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
                f"cannot store features in {self.folder}: it has features of another evaluation, or of files that have "
                "changed; remove it, or name another `out`"
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
            raise UserError(f"{path} is a part of another store, or has other images of this store")
        self._verified.add(part)
        return tensors

    def _file(self, part: range) -> Path:
        return self.folder / f"{part.start:09d}.safetensors"

    def iterate(self, kind: str) -> Iterator[Tensor]:
        """Yield the tensor `kind` of each part that has one, in order."""
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


def _check_features(name: str, features: Tensor, n: int) -> None:
    """Raise a UserError unless `features` are finite float32 numbers (n, d)."""
    shape = tuple(features.shape)
    fits = features.dtype == torch.float32 and len(shape) == 2 and shape[0] == n
    if not fits or not features.isfinite().all():
        raise UserError(f"{name} {features.dtype} {shape} of {n} images are not finite float32 numbers (n, d)")
