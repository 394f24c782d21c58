"""Feature extraction by one or more processes: parts, order and numbers do not depend on how many there are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from tqdm import tqdm

from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.evaluation.store import Store
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.files import check_writable

PART = 256  # most images in a part of a store
PARTS = 24  # parts of a small set: work for up to 24 processes, while the parts do not depend on their number
SHOWN = 100  # first samples, whose images are kept for the report


def parts_of(count: int) -> list[range]:
    """Split range(count) into consecutive parts, independent of processes and batch size."""
    return batches(count, min(PART, -(-count // PARTS)), 1)


def about(images: ImageSource, extractor: Extractor, keep: Sequence[str]) -> dict[str, Any]:
    """Return everything that the tensors of a store depend on, as `Store` takes it."""
    return {"images": images.fingerprint(), "n": len(images), "extractor": extractor.fingerprint(), "keep": list(keep)}


def extract(
    images: ImageSource,
    extractor: Extractor,
    store: Store,
    keep: Sequence[str],
    batch_size: int,
    processes: Processes,
    device: torch.device,
    show: bool = True,
) -> None:
    """Extract the features that `store` lacks and add them; all processes take part.

    Args:
        images: images to extract features of.
        extractor: prepared extractor, on `device`.
        store: store of these images and this extractor.
        keep: some of "features", "logits", "spatial"; "images" keeps all images, "shown" the first ones, as uint8.
        batch_size: images at a time; affects numbers only by rounding.
        processes: processes that share the work.
        device: device on which features are extracted.
        show: draw a progress bar.

    Raises:
        UserError: images that cannot be read, or what `Store.open` raises.
    """
    # Only the first process locks, reads and writes the store; the list of missing parts is shared with the others.
    with _alone(store) if processes.is_main else nullcontext():
        missing: list[range] = processes.broadcast(store.open() if processes.is_main else None)
        # The batches of this process, in the order in which `map_ordered` asks for its parts: reading can run ahead.
        mine = [batch for part in missing[processes.rank :: processes.size] for batch in _cut(part, batch_size)]
        with _read_ahead(images, mine) as take:

            def work(part: range) -> dict[str, Tensor]:
                calls = images.nfe
                found = [_tensors(take(batch), part, extractor, keep, device) for batch in _cut(part, batch_size)]
                joined = {name: torch.cat([tensors[name] for tensors in found]) for name in found[0]}
                return {**joined, "calls": torch.tensor([images.nfe - calls])}

            # Parts arrive in order on the first process. On the others `done` is empty, so that the loop below has no
            # steps, but iterating it to the end is what makes them work; hence `strict` on the first process only.
            done = processes.map_ordered(missing, work)
            bar = tqdm(total=len(store), unit="image", desc=images.name, disable=not (show and processes.is_main))
            with bar:
                bar.update(len(store) - sum(map(len, missing)))
                for part, tensors in zip(missing, done, strict=processes.is_main):
                    store.add(part, tensors)
                    bar.update(len(part))


def _cut(part: range, batch_size: int) -> list[range]:
    return [part[start : start + batch_size] for start in range(0, len(part), batch_size)]


@contextmanager
def _alone(store: Store) -> Iterator[None]:
    """Hold an exclusive lock on the store: two evaluations may share a reference."""
    check_writable(store.lock)
    lock = FileLock(store.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another program that fills {store.folder}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _tensors(
    images: Tensor, part: range, extractor: Extractor, keep: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors to keep for `images`, a batch of `part`, on the CPU."""
    found = extractor(images.to(device, non_blocking=True))
    kept = {name: getattr(found, name).cpu() for name in ("features", "logits", "spatial") if name in keep}
    if "images" in keep or ("shown" in keep and part.start < SHOWN):
        kept["images"] = images.cpu()
    return kept


@contextmanager
def _read_ahead(images: ImageSource, parts: Sequence[range]) -> Iterator[Callable[[range], Tensor]]:
    """Yield a function that returns the images of these parts, in this order, while a thread reads the next part.

    Sources that do not allow it (`prefetch` is false) are read directly.
    """
    if not images.prefetch:
        yield images.read
        return
    # A prefetch of depth one: at any time at most one part is being read, or has been read and waits.
    waiting = iter(parts)
    with ThreadPoolExecutor(1) as reader:

        def start() -> Future[Tensor] | None:
            following = next(waiting, None)
            return None if following is None else reader.submit(images.read, following)

        next_up = start()

        def take(part: range) -> Tensor:
            # Wait for the part that was started last, then start the next one while the caller uses this one.
            nonlocal next_up
            found, next_up = next_up.result(), None
            next_up = start()
            return found

        yield take
