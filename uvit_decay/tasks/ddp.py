"""DDP: every process holds the whole network, and gradients are averaged."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from uvit_decay.runtime.distributed import TRAINING, Processes, choose_interface

PLACES = {"data.path", "data.test_path"}  # settings that may differ where nodes have copies of the images


def register_ddp() -> None:
    """Let `ddp`, and `auto` on several devices, be `Replicated`."""
    StrategyRegistry.register("ddp", Replicated, "without needless copies", override=True)


class Replicated(DDPStrategy):
    """Lightning's DDP strategy without needless copies, with the timeout of training and gloo's interface.

    Buffers are not broadcast at each step: they are constant, or statistics of batch norms, which `ClassifyTask`
    averages. Gradients are views of the communication buckets.

    Args:
        timeout: how long a process waits for another one, at the start and in a collective.
        options: of DDPStrategy.

    Raises:
        UserError: processes have different settings, or resume from different checkpoints.
    """

    def __init__(self, *, timeout: timedelta = TRAINING, **options: Any) -> None:
        known = inspect.signature(DistributedDataParallel).parameters
        # torch 2.15 renames it.
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        super().__init__(timeout=timeout, **{buffers: False, "gradient_as_bucket_view": True, **options})

    def setup_distributed(self) -> None:
        choose_interface(self.cluster_environment.main_address)
        super().setup_distributed()
        task = self.lightning_module
        settings = {name: str(value) for name, value in task.settings.items() if name not in PLACES}
        Processes.current().check_same("the flag", settings | {"ckpt_path": str(task.start)})
