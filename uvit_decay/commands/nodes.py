"""Check that a trainer counts the processes that a launcher has started."""

from __future__ import annotations

import os

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

from uvit_decay.runtime.distributed import BY_HAND, find_launcher
from uvit_decay.runtime.errors import UserError


def check_nodes(trainer: Trainer) -> None:
    """Raise a UserError if the trainer counts other processes than a launcher has started, or cannot find its nodes."""
    started, launcher = find_launcher()
    strategy = trainer.strategy
    outside = isinstance(strategy, ParallelStrategy) and strategy.cluster_environment.creates_processes_externally
    counted = trainer.num_nodes * trainer.num_devices  # torchrun's environment has its own `world_size`
    flags = f"--trainer.num_nodes {trainer.num_nodes} x {trainer.num_devices} devices"
    if trainer.num_nodes > 1 and not outside:
        unset = [name for name in BY_HAND if name not in os.environ]
        if unset:
            raise UserError(f"{flags}: set {', '.join(unset)} on every node, or use a launcher (docs/machines.md)")
    elif started != counted and (outside or started > 1):
        raise UserError(
            f"{launcher} has started {started} processes, the trainer counts {counted} ({flags}): set "
            "--trainer.num_nodes to the nodes, and --trainer.devices to the processes of each"
        )
