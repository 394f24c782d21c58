"""What an extractor says of pictures, kept on disk part by part: what is there survives a kill, and is used again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.disk import at_home, check_writable, replacing
from uvit_decay.errors import UserError
from uvit_decay.metrics.frechet import Moments, Statistics
from uvit_decay.plain import read_json
from uvit_decay.tensor_files import load_tensors, save_tensors

FLOATS = ("features", "logits", "spatial")  # float32 (n, d)
WHOSE = "whose"  # in the metadata of a part: its place, and the store that it is of


def cache_folder() -> Path:
    """Where features of references are kept: $XDG_CACHE_HOME/uvit_decay, else ~/.cache/uvit_decay."""
    return at_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "uvit_decay"


class Store:
    """Tensors of consecutive parts of n pictures: `features` float32 (n, d), and perhaps more; one file for each part.

    Only the first process opens it, writes and reads.

    Args:
        folder: of this store alone.
        about: plain values of all that the tensors depend on.
        parts: consecutive, together range(n).
    """

    def __init__(self, folder: Path, about: dict[str, Any], parts: Sequence[range]) -> None:
        self.folder, self.about, self.parts = folder, {**about, "parts": [part.stop for part in parts]}, list(parts)
        self._key = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()
        self._loaded: dict[str, Tensor] = {}
        self._verified: set[range] = set()
        self._widths: dict[str, int] | None = None  # of all parts, by the names in FLOATS

    @classmethod
    def cached(cls, about: dict[str, Any], parts: Sequence[range]) -> Store:
        """In the cache, under the hash of `about`."""
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
        return cls(cache_folder() / "features" / name, about, parts)

    def __len__(self) -> int:
        return self.parts[-1].stop

    def open(self) -> list[range]:
        """Make the folder, or go on with what is there; returns the parts that are missing.

        What is there is compared with its checksums; a damaged part is removed, with a remark, and so is missing.

        Raises:
            UserError: the folder is of something else, or cannot be written.
        """
        check_writable(self.folder, folder=True)
        path = self.folder / "about.json"
        wanted = json.loads(json.dumps(self.about))
        if path.exists():
            if self._about(path) != wanted:
                raise UserError(
                    f"{self.folder} keeps the features of another evaluation: remove it, or name another --out"
                )
        else:
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):  # what a crash left is hidden
                raise UserError(f"{self.folder} is in the way: features are to be kept there, and it is not empty")
            with replacing(path) as file:
                file.write(json.dumps(wanted, indent=1).encode())
        return [part for part in self.parts if not self._file(part).exists() or not self._is_whole(part)]

    def _about(self, path: Path) -> Any:
        try:
            return read_json(path, object)
        except UserError as error:
            raise UserError(f"{error}: remove {self.folder}, and its features are made anew") from error

    def _is_whole(self, part: range) -> bool:
        try:
            self._read(part)
        except UserError as error:
            print(f"{error}: it is made anew", file=sys.stderr)
            return False
        return True

    def add(self, part: range, tensors: dict[str, Tensor]) -> None:
        """Keep the tensors of one part, each with len(part) rows.

        Raises:
            UserError: features that are not finite or do not fit those of other parts, or it cannot be written.
        """
        self._check(part, tensors)
        save_tensors(self._file(part), tensors, {WHOSE: self._whose(part)})
        self._verified.add(part)

    def _whose(self, part: range) -> str:
        return f"{part.start} of {self._key}"

    def _read(self, part: range) -> dict[str, Tensor]:
        """The tensors of a part, verified once.

        Raises:
            UserError: it is damaged, in the place of another one, or not what this store holds.
        """
        path, known = self._file(part), part in self._verified
        metadata, tensors = load_tensors(path, verify=not known)
        if metadata.get(WHOSE, self._whose(part)) != self._whose(part):
            raise UserError(f"{path} is of another store, or of other pictures of this one")
        if not known:
            self._check(part, tensors)
            self._verified.add(part)
        return tensors

    def _check(self, part: range, tensors: dict[str, Tensor]) -> None:
        """Raise a UserError unless these can be the tensors of a part, with the widths of the parts before."""
        path, count = self._file(part), len(part)
        for name, tensor in tensors.items():
            rows, found = len(tensor) if tensor.ndim else 0, (name, tensor.dtype, tensor.ndim)
            numbers = found in [(kind, torch.float32, 2) for kind in FLOATS] and rows == count
            pictures = found == ("pictures", torch.uint8, 4) and 0 < rows <= count
            if not (numbers or pictures or (found == ("calls", torch.int64, 1) and rows == 1)):
                raise UserError(f"{path} has {name} {tensor.dtype} {tuple(tensor.shape)} for {count} pictures")
            if numbers and not tensor.isfinite().all():
                raise UserError(f"{path} has {name} that are not finite")
        widths = {name: tensor.shape[1] for name, tensor in tensors.items() if name in FLOATS}
        if "features" not in widths or widths != (self._widths or widths):
            raise UserError(f"{path} has {widths} numbers for each picture, other parts have {self._widths}")
        self._widths = widths

    def _file(self, part: range) -> Path:
        return self.folder / f"{part.start:09d}.safetensors"

    def iterate(self, kind: str) -> Iterator[Tensor]:
        """The tensor `kind` of part after part; parts that have none are left out.

        Raises:
            UserError: a damaged file; it is removed, so that the next run makes it anew.
        """
        for part in self.parts:
            try:
                tensors = self._read(part)
            except UserError as error:
                self._file(part).unlink(missing_ok=True)
                raise UserError(f"{error}; it is removed: run again") from error
            if kind in tensors:
                yield tensors[kind]

    def tensor(self, kind: str) -> Tensor:
        """All rows of `kind`, in order; read once, and kept in memory."""
        if kind not in self._loaded:
            self._loaded[kind] = torch.cat(list(self.iterate(kind)))
        return self._loaded[kind]

    def statistics(self, kind: str = "features") -> Statistics:
        """Mean and covariance of `features` or `spatial`, from sums in float64."""
        moments: Moments | None = None
        for rows in _large(self.iterate(kind)):
            moments = moments or Moments(rows.shape[1], sync=False)
            moments.update(rows)
        return moments.compute()

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder)
        self.lock.unlink(missing_ok=True)

    @property
    def lock(self) -> Path:
        """Held by the program that fills the store."""
        return self.folder.with_name(self.folder.name + ".lock")


def _large(parts: Iterator[Tensor], rows: int = 4096) -> Iterator[Tensor]:
    """The same rows in larger pieces: a product of many is several times faster than many products."""
    waiting: list[Tensor] = []
    for part in parts:
        waiting.append(part)
        if sum(map(len, waiting)) >= rows:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)
