"""The start of every command: its processes, its device, and outputs that no other program writes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from uvit_decay.files.writing import check_writable, claim_paths
from uvit_decay.runtime.distributed import Processes, pick_device
from uvit_decay.terminal.progress import track

if TYPE_CHECKING:
    from uvit_decay.evaluation.image_sources import ImageSource


@contextmanager
def open_program(
    files: Sequence[Path] = (), device: str | None = None, timeout: timedelta | None = None
) -> Iterator[tuple[Processes, torch.device]]:
    """Yield the processes of this program and the device of this one; long work prints a line about every 20 seconds.

    Args:
        files: files that are read, which must be the same on all nodes.
        device: name of the device; None takes the GPU of this process, if there is one.
        timeout: how long a process waits for another one; None: half an hour.
    """
    with Processes.launch(timeout, device) as processes:
        for file in files:
            processes.check_file(file)
        chosen = pick_device(device, processes.local_rank)
        with track(shown=processes.is_main):
            yield processes, chosen


def tell_what_was_read(images: Iterable[ImageSource | None], processes: Processes) -> None:
    """Print, on the first process, what was read of the files of images, and what was not; each line once."""
    lines = {source.describe() for source in images if source is not None} - {""}
    if processes.is_main:
        for line in sorted(lines):
            print(line, file=sys.stderr)


@contextmanager
def claim_outputs(*paths: Path, processes: Processes, folder: bool = False) -> Iterator[None]:
    """Claim the outputs of a command in the context: no other program writes them.

    Args:
        paths: files, or one folder.
        processes: the processes of this program; the first one claims the outputs.
        folder: True if the output is a folder.
    """
    for path in paths:
        check_writable(path, folder)
    with claim_paths(*paths, first=processes.is_main):
        yield
