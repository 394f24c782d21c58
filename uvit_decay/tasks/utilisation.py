"""Throughput, model FLOPs utilisation (MFU) and peak memory of training."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import psutil
import torch
from lightning.fabric.utilities.throughput import get_available_flops, measure_flops
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.func import functional_call

from uvit_decay.data.batches import Batch
from uvit_decay.runtime.precision import FLOAT16
from uvit_decay.tasks.parallel.sharding import skeleton
from uvit_decay.terminal.errors import one_line

try:
    import resource
except ImportError:  # on Windows
    resource = None

DTYPES = {  # by precision
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    FLOAT16: torch.float16,
    "64-true": torch.float64,
}


class Utilisation:
    """Speed of a run and its model FLOPs utilisation: the FLOPs of its images over the peak rate of its devices.

    The rate is the data sheet's; there is no utilisation for devices that Lightning does not know. FLOPs are counted
    once, when training starts, without memory or time of the device. The speed is measured since the last `restart`.
    """

    def __init__(self) -> None:
        self.images = 0  # trained on since the last restart, on all devices
        self.speed = 0.0  # images/s, once it is measured
        self._since = time.monotonic()
        self._rate: float | None = None  # images/s if the devices of this run always reached their peak rate
        self._device = torch.device("cpu")

    def start(self, task: LightningModule) -> None:
        """Find rate and FLOPs; print one line if the FLOPs cannot be counted. The run then has no utilisation."""
        self._device = task.device
        self._rate = None
        dtype = DTYPES.get(task.trainer.precision, torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning warns that it does not know a GPU
            peak = get_available_flops(task.device, dtype)
        if peak is None:
            return
        try:
            flops = image_flops(task)
        except Exception as error:  # a network or a loss of the user's may raise anything
            kind = type(task.net).__name__
            rank_zero_info(f"no train/mfu: the FLOPs of {kind} cannot be counted, {one_line(error)}")
            return
        if flops:
            self._rate = task.trainer.world_size * peak / flops

    def restart(self) -> None:
        """Count images and time from now on; the speed is not known until it is measured again."""
        self.images = 0
        self.speed = 0.0
        self._since = time.monotonic()

    def measure(self) -> None:
        """Measure the speed of all devices."""
        self.speed = self.images / (time.monotonic() - self._since)

    def figures(self) -> dict[str, float]:
        """Return the logged figures: speed and MFU (a share) of all devices, and peak memory of this one in GiB."""
        figures = {"train/images_per_second": self.speed, "train/memory_gib": peak_bytes(self._device) / 2**30}
        if self._rate:
            figures["train/mfu"] = self.speed / self._rate
        return figures


def image_flops(task: LightningModule) -> float:
    """Return the model FLOPs of training on an image: forward and backward pass, without any recomputation.

    They are counted for a micro-batch, with copies of the network and of the task's own modules on the meta device.
    FLOPs of auxiliary losses do not count as the model's, and hooks of the network's modules do not run.
    """
    data = task.data
    net = task.net
    count = data.batch_size // (task.trainer.world_size * data.micro_batches)
    images = torch.empty(count, net.channels, net.image_size, net.image_size, device="meta")
    labels = torch.empty(count, dtype=torch.int64, device="meta")
    batch = Batch(images, labels, number=0, first=0, total=data.batch_size)
    task.net = _copy_to_meta(net)
    loss = _Loss(task)
    own = {}
    for name, tensor in (*task.named_parameters(), *task.named_buffers()):
        if not name.startswith("net."):
            own[f"task.{name}"] = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    try:
        return measure_flops(loss, lambda: functional_call(loss, own, batch).backward()) / count
    finally:
        task.net = net


def _copy_to_meta(net: nn.Module) -> nn.Module:
    """Return a network like this one on the meta device, without recomputation."""
    changed = {}
    if "checkpointing" in net.config:
        changed["checkpointing"] = False
    copy = skeleton(net, changed)
    for ours, theirs in zip(copy.parameters(), net.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    for ours, theirs in zip(copy.modules(), net.modules(), strict=True):
        ours.training = theirs.training
    return copy


class _Loss(nn.Module):
    """The loss of a task as a module, whose weights `functional_call` can replace."""

    def __init__(self, task: LightningModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, *batch: Any) -> Tensor:
        return self.task.loss(Batch(*batch), "train")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: its tensors on a GPU, otherwise its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)  # Windows keeps the peak of the working set
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
