"""The network of `SmallClassifier` and its training, which takes seconds on a CPU; n = images."""

from __future__ import annotations

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from uvit_decay.image_io import to_float
from uvit_decay.runtime.distributed import cpu_threads
from uvit_decay.runtime.precision import full_float32
from uvit_decay.runtime.random import generator


def train(images: UInt8[Tensor, "n c h w"], labels: Int64[Tensor, " n"], dim: int, steps: int) -> nn.Sequential:
    """Train a classifier of these images; equal at each call, independent of the global random state and modes."""
    with (
        torch.random.fork_rng(),
        torch.enable_grad(),
        torch.inference_mode(False),
        full_float32(images.device),
        cpu_threads(1),  # the rounding of sums depends on the number of threads
    ):
        torch.manual_seed(0)
        return _train(images, labels, dim, steps)


def _train(images: Tensor, labels: Tensor, dim: int, steps: int) -> nn.Sequential:
    net = _small_cnn(images.shape[1], dim, int(labels.max()) + 1)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    random = generator("small classifier")
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,), generator=random)
        loss = nn.functional.cross_entropy(net(to_float(images[chosen])), labels[chosen], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval().requires_grad_(False)


def _small_cnn(channels: int, dim: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, dim, 3, padding=1),
        nn.BatchNorm2d(dim),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(dim, classes),
    )
