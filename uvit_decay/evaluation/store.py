"""What an extractor says of pictures, kept on disk part by part: what is there survives a kill, and is used again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from uvit_decay.disk import check_writable, replacing
from uvit_decay.errors import UserError, one_line
from uvit_decay.metrics.frechet import Moments, Statistics


def cache_folder() -> Path:
    """Where features of references are kept: $XDG_CACHE_HOME/uvit_decay, else ~/.cache/uvit_decay."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "uvit_decay"


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
        self._loaded: dict[str, Tensor] = {}

    @classmethod
    def cached(cls, about: dict[str, Any], parts: Sequence[range]) -> Store:
        """In the cache, under the hash of `about`."""
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
        return cls(cache_folder() / "features" / name, about, parts)

    def __len__(self) -> int:
        return self.parts[-1].stop

    def open(self) -> list[range]:
        """Make the folder, or go on with what is there; returns the parts that are missing.

        Raises:
            UserError: the folder is of something else, or cannot be written.
        """
        check_writable(self.folder, folder=True)
        path = self.folder / "about.json"
        wanted = json.loads(json.dumps(self.about))
        if path.exists():
            if json.loads(path.read_text()) != wanted:
                raise UserError(
                    f"{self.folder} keeps the features of another evaluation: remove it, or name another --out"
                )
        else:
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):  # what a crash left is hidden
                raise UserError(f"{self.folder} is in the way: features are to be kept there, and it is not empty")
            with replacing(path) as file:
                file.write(json.dumps(wanted, indent=1).encode())
        return [part for part in self.parts if not self._file(part).exists()]

    def add(self, part: range, tensors: dict[str, Tensor]) -> None:
        """Keep the tensors of one part, each with len(part) rows."""
        with replacing(self._file(part)) as file:
            file.write(save({name: value.contiguous() for name, value in tensors.items()}))

    def _file(self, part: range) -> Path:
        return self.folder / f"{part.start:09d}.safetensors"

    def iterate(self, kind: str) -> Iterator[Tensor]:
        """The tensor `kind` of part after part; parts that have none are left out.

        Raises:
            UserError: a damaged file; it is removed, so that the next run makes it anew.
        """
        for part in self.parts:
            path = self._file(part)
            try:
                with safe_open(path, framework="pt") as file:
                    if kind in file.keys():  # noqa: SIM118  it is no dict
                        yield file.get_tensor(kind)
            except (SafetensorError, OSError) as error:
                path.unlink(missing_ok=True)
                raise UserError(f"{path} was damaged ({one_line(error)}) and is removed: run again") from error

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
