"""The cache of this machine: its folders and locks, and the trained extractors in it."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from uvit_decay.encoders.extractors import Extractor, TrainedExtractor
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.files.tensor_files import load_tensors, save_tensors
from uvit_decay.files.writing import cache_folder, check_writable
from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.terminal.progress import track

AT_ONCE = 256  # images that are read at a time
_PATIENCE = 3.0  # seconds after which a bar appears


def hash_metadata(metadata: dict[str, Any]) -> str:
    """Return the sha256 of plain values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def lock(path: Path, work: str) -> AbstractContextManager[object]:
    """Wait for an exclusive lock, because two programs may need the same file of the cache; return the lock.

    Args:
        path: the lock file.
        work: what the other program does, for the line that says why this one waits.
    """
    check_writable(path)
    file = FileLock(path)
    try:
        return file.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another program that {work}", file=sys.stderr)
        return file.acquire()


def prepare_extractor(
    extractor: Extractor,
    shape: tuple[int, ...],
    device: torch.device,
    processes: Processes,
    training: ImageSource | None = None,
) -> None:
    """Prepare an extractor on `device`; one that needs labels is trained, unless the cache of this machine has it.

    All processes must call this. They have the same weights afterwards.

    Args:
        extractor: the extractor.
        shape: shape (c, h, w) of the images whose features it is to extract.
        device: the device.
        processes: processes that take part.
        training: labelled images on which an extractor is trained that needs labels; their classes become its classes.
    """
    images = torch.zeros(0, *shape, dtype=torch.uint8)
    labels = torch.zeros(0, dtype=torch.int64)
    if isinstance(extractor, TrainedExtractor):
        _load_or_train(extractor, training, processes)
    elif extractor.needs_labels:
        images = training.read(range(len(training)))
        labels = training.labels
    extractor.prepare(images, labels, device)
    if extractor.needs_labels:
        extractor.class_names = training.class_names


def _load_or_train(extractor: TrainedExtractor, training: ImageSource, processes: Processes) -> None:
    """Load the extractor from the cache, or train it and store it there."""
    labels = hashlib.sha256(training.labels.numpy().tobytes()).hexdigest()
    key = {**extractor.recipe(), "images": training.fingerprint(), "labels": labels, "n": len(training)}
    path = cache_folder("classifiers") / f"{hash_metadata(key)[:32]}.safetensors"
    # One of several processes would keep the others waiting for as long as it waits for another program.
    alone = processes.size == 1
    with lock(path.with_suffix(".lock"), f"trains {extractor.name}") if alone else nullcontext():
        state = None
        if processes.is_main and path.exists():
            _, stored = load_tensors(path)
            state = {name: tensor.clone() for name, tensor in stored.items()}  # not mapped from the file
        state = processes.broadcast(state)
        if state is None:
            # All processes train, so that none waits for minutes. Processors of other nodes may round differently.
            with track(shown=processes.is_main):
                extractor.fit(_read_images(extractor, training), training.labels)
            state = processes.broadcast(extractor.state())
            if processes.is_main:
                check_writable(path)
                save_tensors(path, state, {})
    extractor.load(state)


def _read_images(extractor: TrainedExtractor, training: ImageSource) -> Tensor:
    """Return all images, in the size that the extractor needs, on the CPU."""
    parts = []
    with track(f"reading {training.name}", len(training), "image", delay=_PATIENCE) as work:
        for chosen in batches(len(training), AT_ONCE, 1):
            parts.append(extractor.shrink(training.read(chosen).cpu()))
            work.update(len(chosen))
    return torch.cat(parts)
