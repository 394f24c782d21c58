"""Features of all pictures, by one process or many: the same parts, the same order, and so the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

from uvit_decay.evaluation.pictures import Pictures
from uvit_decay.evaluation.store import Store
from uvit_decay.metrics.features import Extractor
from uvit_decay.processes import Processes, batches

PARTS = 24  # of small sets, so that up to so many processes have work and yet the parts do not depend on them
SHOWN = 100  # samples whose pictures are kept for the report


def parts_of(count: int, batch_size: int) -> list[range]:
    """Consecutive parts of range(count) of at most `batch_size`: the same whatever the processes."""
    return batches(count, min(batch_size, -(-count // PARTS)), 1)


def about(pictures: Pictures, extractor: Extractor, keep: Sequence[str]) -> dict[str, Any]:
    """All that a store's tensors depend on, see `Store`."""
    return {"pictures": pictures.identity(), "n": len(pictures), "extractor": extractor.identity(), "keep": list(keep)}


def extract(
    pictures: Pictures,
    extractor: Extractor,
    store: Store,
    keep: Sequence[str],
    processes: Processes,
    device: torch.device,
    show: bool = True,
) -> None:
    """Fill `store` with what it lacks; all processes take part.

    Args:
        pictures: what is judged.
        extractor: prepared, on `device`.
        store: of these pictures and this extractor.
        keep: of "features", "logits", "spatial"; "pictures" keeps all of them, "shown" the first of them, uint8.
        processes: who else works on this.
        device: where to extract.
        show: draw a progress bar.

    Raises:
        UserError: pictures that cannot be read, or what `Store.open` raises.
    """
    lock = FileLock(store.lock) if processes.first else None
    if lock is not None:
        store.folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()  # two evaluations may want the same reference
    try:
        missing: list[range] = processes.share(store.open() if processes.first else None)
        with _read_ahead(pictures, missing[processes.rank :: processes.size]) as take:

            def work(part: range) -> dict[str, Tensor]:
                calls = pictures.calls
                images = take(part)
                kept = _tensors(images, part, extractor, keep, device)
                return {**kept, "calls": torch.tensor([pictures.calls - calls])}

            done = processes.in_order(missing, work)
            bar = tqdm(total=len(store), unit="image", desc=pictures.name, disable=not (show and processes.first))
            with bar:
                bar.update(len(store) - sum(map(len, missing)))
                for part, tensors in zip(missing, done, strict=processes.first):
                    store.add(part, tensors)
                    bar.update(len(part))
    finally:
        if lock is not None:
            lock.release()


def _tensors(
    images: Tensor, part: range, extractor: Extractor, keep: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """What is kept of one part, on the CPU."""
    found = extractor(images.to(device, non_blocking=True))
    kept = {name: getattr(found, name).cpu() for name in ("features", "logits", "spatial") if name in keep}
    if "pictures" in keep or ("shown" in keep and part.start < SHOWN):
        kept["pictures"] = images.cpu()
    return kept


@contextmanager
def _read_ahead(pictures: Pictures, parts: Sequence[range]) -> Iterator[Callable[[range], Tensor]]:
    """A function that gives the pictures of these parts, in this order, while the next part is being read."""
    if not pictures.ahead:
        yield pictures.read
        return
    waiting = iter(parts)
    with ThreadPoolExecutor(1) as reader:

        def start() -> Future[Tensor] | None:
            following = next(waiting, None)
            return None if following is None else reader.submit(pictures.read, following)

        next_up = start()

        def take(part: range) -> Tensor:
            nonlocal next_up
            found, next_up = next_up.result(), None
            next_up = start()
            return found

        yield take
