"""Feature extraction by one or more processes; parts, order and values do not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from uvit_decay.encoders.extractors import Extractor
from uvit_decay.evaluation.extractor_cache import lock
from uvit_decay.evaluation.feature_store import FLOATS, FeatureStore
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.runtime.concurrency import read_ahead
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.progress import track

PART = 256  # largest number of images in a part of a store
PARTS = 24  # parts of a small set: work for up to 24 processes, although the parts do not depend on their number
SHOWN = 100  # number of first samples whose images are stored for the report


def split_into_parts(count: int) -> list[range]:
    """Split range(count) into consecutive parts, independent of the number of processes and the batch size."""
    return batches(count, min(PART, -(-count // PARTS)), 1)


@dataclass(frozen=True)
class Extraction:
    """Extraction of features of images into a store.

    Args:
        extractor: prepared extractor, on `device`.
        device: device on which features are extracted.
        batch_size: images at a time; affects values only by rounding.
    """

    extractor: Extractor
    device: torch.device
    batch_size: int = 64

    def run(
        self, images: ImageSource, keep: Sequence[str], processes: Processes, folder: Path | None = None
    ) -> FeatureStore:
        """Return a store of the features of `images`; all processes take part in extracting missing parts.

        Args:
            images: images to extract features of.
            keep: some of FLOATS, and "images" for all images or "shown" for the first ones, as uint8.
            processes: processes that share the work.
            folder: folder of the store; None for the cache of this machine, for references.
        """
        if processes.size > 1:
            processes.check_same(images.name, images.content())
        fingerprints = {"images": images.fingerprint(), "extractor": self.extractor.fingerprint()}
        metadata = {**fingerprints, "n": len(images), "keep": list(keep)}
        store = FeatureStore(folder, metadata, split_into_parts(len(images)))
        # Only the first process locks, reads and writes the store.
        with lock(store.lock, f"extracts features to {store.folder}") if processes.is_main else nullcontext():
            extracted = self._fill(store, images, keep, processes)
            if processes.is_main and extracted and images.fingerprint() != fingerprints["images"]:
                store.remove()
                raise UserError(f"{images.name} has changed while its features were extracted: run again")
        return store

    def _fill(self, store: FeatureStore, images: ImageSource, keep: Sequence[str], processes: Processes) -> bool:
        """Extract the missing parts of the store; return whether there were any."""
        missing: list[range] = processes.broadcast(store.open() if processes.is_main else None)
        # The batches of this process, in the order in which `map_ordered` asks for its parts.
        mine: list[range] = []
        for part in missing[processes.rank :: processes.size]:
            mine += self._split_into_batches(part)
        if images.prefetch:
            reader = read_ahead(images.read, mine, self.device)
        else:
            reader = (images.read(batch) for batch in mine)

        def work(part: range) -> dict[str, Tensor]:
            nfe = images.nfe
            batches = [self._extract(next(reader), part, keep) for _ in self._split_into_batches(part)]
            tensors = {}
            for name in batches[0]:
                tensors[name] = torch.cat([batch[name] for batch in batches])
            tensors["calls"] = torch.tensor([images.nfe - nfe])
            return tensors

        # Parts arrive in order on the first process. On the others `done` is empty, so that the loop has no steps, but
        # iterating it to the end makes them work; hence `strict` on the first process only.
        done = processes.map_ordered(missing, work)
        done_before = len(store) - sum(map(len, missing))
        with closing(reader), track(images.name, len(store), "image", done_before, shown=processes.is_main) as shown:
            for part, tensors in zip(missing, done, strict=processes.is_main):
                store.add(part, tensors)
                shown.update(len(part))
        return len(missing) > 0

    def _split_into_batches(self, part: range) -> list[range]:
        return [part[start : start + self.batch_size] for start in range(0, len(part), self.batch_size)]

    def _extract(self, images: Tensor, part: range, keep: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors to store for `images`, a batch of `part`, on the CPU."""
        features = self.extractor(images.to(self.device, non_blocking=True))
        tensors = {}
        for name in FLOATS:
            if name in keep:
                tensors[name] = getattr(features, name).cpu()
        if "images" in keep or ("shown" in keep and part.start < SHOWN):
            tensors["images"] = images.cpu()
        return tensors
