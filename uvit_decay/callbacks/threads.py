"""The number of CPU threads of a run."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from uvit_decay.runtime.errors import check_whole
from uvit_decay.runtime.typed import check_types


@check_types
class CPUThreads(Callback):
    """Sets the number of torch's intra-op threads; tiny networks are fastest with one (docs/LOG.md).

    Args:
        count: threads per process.
    """

    def __init__(self, count: int = 1) -> None:
        check_whole(1, 4096, count=count)
        self.count = count

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        torch.set_num_threads(self.count)
