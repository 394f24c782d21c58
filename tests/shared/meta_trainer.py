"""A trainer on the meta device, the stand-in for a GPU, and what each of its steps waits for."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from record_ops import Waits
from torch.optim import Optimizer

from uvit_decay.callbacks import EMA, LastCheckpoint, Progress
from uvit_decay.data.datamodule import ImageData
from uvit_decay.tasks import Task, base

META = torch.device("meta")
OPTIONS = dict(enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0)


class _MetaAccelerator(Accelerator):
    """What Lightning asks of a device."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [META]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "meta"


class _Steps(Callback):
    """What is waited for from the start of a step to that of the next one, counted."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.found = waits, []

    def on_train_batch_start(self, *_: Any) -> None:
        self.found.append(Counter(self.waits.found))
        self.waits.found.clear()


def waits_of_steps(
    folder: Path, task: Task, data: ImageData, ema: bool = True, save_at: int = 10_000, **options: Any
) -> list[dict[str, int]]:
    """Return what each of the first three steps of a run waits for, counted; the second one is logged."""
    waits = Waits()
    counted = _Steps(waits)
    callbacks = [
        *([EMA(0.9)] if ema else []),
        LastCheckpoint(every_n_steps=save_at),
        Progress(line_every=0),
    ]
    callbacks.append(counted)
    strategy = SingleDeviceStrategy(META, accelerator=_MetaAccelerator())
    options = {**OPTIONS, "logger": False, "log_every_n_steps": 2, **options}
    trainer = Trainer(
        strategy=strategy, devices=1, max_steps=4, default_root_dir=folder, callbacks=callbacks, **options
    )
    with pytest.MonkeyPatch.context() as patch, waits:
        patch.setattr(base, "NEVER", 1)  # as every number of this device is
        for kind in ("fused", "foreach"):  # torch has both for meta tensors, but does not offer them
            patch.setattr(sys.modules[Optimizer.__module__], f"_get_{kind}_kernels_supported_devices", lambda: ["meta"])
        trainer.fit(task, data)
    return [dict(found) for found in counted.found[1:]]
