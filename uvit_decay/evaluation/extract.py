"""Feature extraction by one or more processes: parts, order and numbers do not depend on how many there are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from tqdm import tqdm

from uvit_decay.evaluation.feature_store import FLOATS, FeatureStore
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.runtime.concurrency import read_ahead
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable

PART = 256  # most images in a part of a store
PARTS = 24  # parts of a small set: work for up to 24 processes, while the parts do not depend on their number
SHOWN = 100  # first samples, whose images are kept for the report


def parts_of(count: int) -> list[range]:
    """Split range(count) into consecutive parts, independent of processes and batch size."""
    return batches(count, min(PART, -(-count // PARTS)), 1)


@dataclass(frozen=True)
class Extraction:
    """Extraction of features of images into a store.

    Args:
        extractor: prepared extractor, on `device`.
        device: device on which features are extracted.
        batch_size: images at a time; affects numbers only by rounding.
        show: draw a progress bar.
    """

    extractor: Extractor
    device: torch.device
    batch_size: int = 64
    show: bool = True

    def run(
        self, images: ImageSource, keep: Sequence[str], processes: Processes, folder: Path | None = None
    ) -> FeatureStore:
        """Return a store of the features of `images`; all processes take part in extracting those that it lacks.

        Args:
            images: images to extract features of.
            keep: some of FLOATS; "images" keeps all images, "shown" the first ones, as uint8.
            processes: processes that share the work.
            folder: folder of the store; None means the cache of this machine, for references.
        """
        if processes.size > 1:
            processes.check_same(images.name, images.content())
        fingerprints = {"images": images.fingerprint(), "extractor": self.extractor.fingerprint()}
        metadata = {**fingerprints, "n": len(images), "keep": list(keep)}
        store = FeatureStore(folder, metadata, parts_of(len(images)))
        # Only the first process locks, reads and writes the store.
        with _locked(store) if processes.is_main else nullcontext():
            extracted = self._fill(store, images, keep, processes)
            if processes.is_main and extracted and images.fingerprint() != fingerprints["images"]:
                store.remove()
                raise UserError(f"{images.name} has changed while its features were extracted: run again")
        return store

    def _fill(self, store: FeatureStore, images: ImageSource, keep: Sequence[str], processes: Processes) -> bool:
        """Extract the parts that the store lacks; return whether there were any."""
        missing: list[range] = processes.broadcast(store.open() if processes.is_main else None)
        # The batches of this process, in the order in which `map_ordered` asks for its parts.
        mine = [batch for part in missing[processes.rank :: processes.size] for batch in self._batches(part)]
        reader = read_ahead(images.read, mine, self.device) if images.prefetch else (images.read(part) for part in mine)

        def work(part: range) -> dict[str, Tensor]:
            nfe = images.nfe
            rows = [self._tensors(next(reader), part, keep) for _ in self._batches(part)]
            tensors = {name: torch.cat([batch[name] for batch in rows]) for name in rows[0]}
            return {**tensors, "calls": torch.tensor([images.nfe - nfe])}

        # Parts arrive in order on the first process. On the others `done` is empty, so that the loop has no steps, but
        # iterating it to the end makes them work; hence `strict` on the first process only.
        done = processes.map_ordered(missing, work)
        hidden = not (self.show and processes.is_main)
        with closing(reader), tqdm(total=len(store), unit="image", desc=images.name, disable=hidden) as bar:
            bar.update(len(store) - sum(map(len, missing)))
            for part, tensors in zip(missing, done, strict=processes.is_main):
                store.add(part, tensors)
                bar.update(len(part))
        return len(missing) > 0

    def _batches(self, part: range) -> list[range]:
        return [part[start : start + self.batch_size] for start in range(0, len(part), self.batch_size)]

    def _tensors(self, images: Tensor, part: range, keep: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors to keep for `images`, a batch of `part`, on the CPU."""
        features = self.extractor(images.to(self.device, non_blocking=True))
        kept = {name: getattr(features, name).cpu() for name in FLOATS if name in keep}
        if "images" in keep or ("shown" in keep and part.start < SHOWN):
            kept["images"] = images.cpu()
        return kept


def _locked(store: FeatureStore) -> AbstractContextManager[object]:
    """Return an exclusive lock on the store, once it is free: two evaluations may share a reference."""
    check_writable(store.lock)
    lock = FileLock(store.lock)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another program that fills {store.folder}", file=sys.stderr)
        return lock.acquire()
