"""Features of all pictures, by one process or many: the same parts, the same order, and so the same numbers."""

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

from uvit_decay.disk import check_writable
from uvit_decay.evaluation.pictures import Pictures
from uvit_decay.evaluation.store import Store
from uvit_decay.metrics.features import Extractor
from uvit_decay.processes import Processes, batches

PART = 256  # pictures whose features are kept together; at most
PARTS = 24  # of small sets, so that up to so many processes have work and yet the parts do not depend on them
SHOWN = 100  # samples whose pictures are kept for the report


def parts_of(count: int) -> list[range]:
    """Consecutive parts of range(count): the same whatever the processes and the batch size."""
    return batches(count, min(PART, -(-count // PARTS)), 1)


def about(pictures: Pictures, extractor: Extractor, keep: Sequence[str]) -> dict[str, Any]:
    """All that a store's tensors depend on, see `Store`."""
    return {"pictures": pictures.identity(), "n": len(pictures), "extractor": extractor.identity(), "keep": list(keep)}


def extract(
    pictures: Pictures,
    extractor: Extractor,
    store: Store,
    keep: Sequence[str],
    batch_size: int,
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
        batch_size: pictures at a time; changes no number by more than rounding.
        processes: who else works on this.
        device: where to extract.
        show: draw a progress bar.

    Raises:
        UserError: pictures that cannot be read, or what `Store.open` raises.
    """
    with _alone(store) if processes.first else nullcontext():
        missing: list[range] = processes.share(store.open() if processes.first else None)
        mine = [batch for part in missing[processes.rank :: processes.size] for batch in _cut(part, batch_size)]
        with _read_ahead(pictures, mine) as take:

            def work(part: range) -> dict[str, Tensor]:
                calls = pictures.calls
                found = [_tensors(take(batch), part, extractor, keep, device) for batch in _cut(part, batch_size)]
                joined = {name: torch.cat([tensors[name] for tensors in found]) for name in found[0]}
                return {**joined, "calls": torch.tensor([pictures.calls - calls])}

            done = processes.in_order(missing, work)
            bar = tqdm(total=len(store), unit="image", desc=pictures.name, disable=not (show and processes.first))
            with bar:
                bar.update(len(store) - sum(map(len, missing)))
                for part, tensors in zip(missing, done, strict=processes.first):
                    store.add(part, tensors)
                    bar.update(len(part))


def _cut(part: range, batch_size: int) -> list[range]:
    return [part[start : start + batch_size] for start in range(0, len(part), batch_size)]


@contextmanager
def _alone(store: Store) -> Iterator[None]:
    """No other program fills the store meanwhile: two evaluations may want the same reference."""
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
