"""The number of CPU threads of a training step."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from uvit_decay.runtime.errors import check_whole


class CPUThreads(Callback):
    """Number of torch's intra-op threads. Tiny networks are fastest with one: more wait for each other (docs/LOG.md).

    Args:
        count: threads of each process.
    """

    def __init__(self, count: int = 1) -> None:
        check_whole(1, 4096, count=count)
        self.count = count

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        torch.set_num_threads(self.count)
