"""The number of CPU threads of a run."""

from __future__ import annotations

from typing import Annotated

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from uvit_decay.terminal.typed import Bounds, check_types


@check_types
class CPUThreads(Callback):
    """Sets the number of torch's intra-op threads; tiny networks are fastest with one (docs/LOG.md).

    Args:
        count: threads per process.
    """

    def __init__(self, count: Annotated[int, Bounds(1, 4096)] = 1) -> None:
        self.count = count

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        torch.set_num_threads(self.count)
