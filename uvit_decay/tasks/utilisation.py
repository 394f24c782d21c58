"""What training makes of the machine: speed, model FLOPs utilisation (MFU), and peak memory."""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from uvit_decay.data.batches import Batch
from uvit_decay.runtime.errors import one_line
from uvit_decay.tasks.sharding import skeleton

DTYPES = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "64-true": torch.float64}  # by precision
SECONDS = 0.1  # time of the products that are timed


class Utilisation:
    """Speed of a run and its model FLOPs utilisation: the FLOPs of its images over the matrix rate of its devices.

    FLOPs and rate are measured once, when training starts: the FLOPs of the network without memory or time of the
    device, the rate by a square product in the dtype of training. The speed is that since the last `restart`.
    """

    def __init__(self) -> None:
        self.images = 0  # trained on since the last restart, on all devices
        self.speed = 0.0  # images/s, once it is measured
        self._since = time.monotonic()
        self._rate: float | None = None  # images/s of this run's devices if they did nothing but matrix products
        self._device = torch.device("cpu")

    def start(self, task: LightningModule) -> None:
        """Measure; a network whose FLOPs cannot be counted has no utilisation, which one line says."""
        self._device, self._rate = task.device, None
        flops: float | None = None
        try:
            with suppress(Exception):  # a loss that reads states from hooks needs these
                flops = image_flops(task)
            if flops is None:
                flops = image_flops(task, hooks=True)
        except Exception as error:  # networks are the user's, too
            rank_zero_info(f"no train/mfu: the FLOPs of {type(task.net).__name__} cannot be counted, {one_line(error)}")
            return
        dtype = DTYPES.get(task.trainer.precision, torch.float32)
        rate = matrix_rate(task.device, dtype, torch.get_num_threads())
        self._rate = task.trainer.world_size * rate / flops if flops else None

    def restart(self) -> None:
        """Count images and time from now on; the speed is not known until it is measured again."""
        self.images, self.speed, self._since = 0, 0.0, time.monotonic()

    def measure(self) -> None:
        """Measure the speed of all devices."""
        self.speed = self.images / (time.monotonic() - self._since)

    def figures(self) -> dict[str, float]:
        """Return what is logged: speed and MFU, a share, of all devices, and the GiB that this one holds at most."""
        figures = {"train/images_per_second": self.speed, "train/memory_gib": peak_bytes(self._device) / 2**30}
        return {**figures, "train/mfu": self.speed / self._rate} if self._rate else figures


def image_flops(task: LightningModule, hooks: bool = False) -> float:
    """Return the model FLOPs of training on an image: forward and backward pass, without any recomputation.

    They are counted for a micro-batch on the meta device, with the network and the task's own modules there, too. Those
    of auxiliary losses are not the model's.

    Args:
        task: the task, attached to its trainer.
        hooks: whether the hooks of the network's modules run, as the loss of a task may need; sharded ones never do.
    """
    data, net = task.data, task.net
    count = data.batch_size // (task.trainer.world_size * data.micro_batches)
    images = torch.empty(count, net.channels, net.image_size, net.image_size, device="meta")
    labels = torch.empty(count, dtype=torch.int64, device="meta")
    batch = Batch(images, labels, number=0, first=0, total=data.batch_size)
    task.net = skeleton(net, {"checkpointing": False} if "checkpointing" in net.config else {})
    for ours, theirs in zip(task.net.parameters(), net.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    for ours, theirs in zip(task.net.modules(), net.modules(), strict=True):
        ours.training = theirs.training
        if hooks and not isinstance(net, FSDPModule):
            ours._forward_hooks, ours._forward_pre_hooks = theirs._forward_hooks, theirs._forward_pre_hooks
    counted = _LossOf(task)
    own = {f"task.{name}": value for name, value in (*task.named_parameters(), *task.named_buffers())}
    own = {name: on_meta(value) for name, value in own.items() if not name.startswith("task.net.")}
    try:
        with torch.autograd.set_detect_anomaly(False):  # it reads values
            return counted_flops(lambda: functional_call(counted, own, batch).backward()) / count
    finally:
        task.net = net


class _LossOf(nn.Module):
    """The loss of a task as a module, whose weights `functional_call` can replace."""

    def __init__(self, task: LightningModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, *batch: Any) -> Tensor:
        return self.task.loss(Batch(*batch), "train")


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor like this one on the meta device, which asks for a gradient as it does."""
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def counted_flops(work: Callable[[], object]) -> int:
    """Return the floating-point operations of the matrix products, convolutions and attention of `work()`."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@functools.cache
def matrix_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Return the FLOP/s of a square product in this dtype, with so many threads on a CPU; it takes 0.2 s once."""
    from torch.utils.benchmark import Timer  # warns of CUDA toolkits without a GPU, of which most commands know nothing

    side = 4096 if device.type == "cuda" else 1024  # with which each reaches its rate
    # Random numbers, as in training: a GPU multiplies constant matrices faster, since it takes less power.
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=random, device=device).to(dtype) for _ in range(2))
    timer = Timer(
        "torch.mm(a, b, out=out)", globals={"torch": torch, "a": a, "b": b, "out": a @ b}, num_threads=threads
    )
    return 2 * side**3 / min(timer.blocked_autorange(min_run_time=SECONDS).times)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes of a GPU's memory that tensors of this process held, elsewhere its largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
