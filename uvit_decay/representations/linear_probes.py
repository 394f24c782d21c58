"""Linear classifiers of frozen features, trained step by step as published protocols do.

The classifiers of several layers see the same images in the same order but share no weights, and every optimizer here
works by tensor: each is trained as if it were alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, AdamW, Optimizer

from uvit_decay.nn.embed import without_autocast
from uvit_decay.runtime.optimizers import LARS
from uvit_decay.runtime.random import generator

CHUNK = 4096  # test images judged at a time


@dataclass(frozen=True)
class LinearProbe:
    """A way to train linear classifiers.

    Args:
        epochs: passes over the training images.
        batch_size: images in a batch; the last one of a pass may be smaller, behind a norm not a single image.
        lr: largest learning rate.
        optimizer: makes the optimizer of parameters and their rate.
        schedule: the share of `lr` after so many passes, parts of one included, of all.
        words: optimizer and schedule for reports.
        norm: a batch norm with weights before the linear layer.
        std: standard deviation of the initial weights, behind biases of 0; None means torch's of a linear layer.
        seed: seed of the initial weights, the same in all layers, and of the order.
    """

    epochs: int
    batch_size: int
    lr: float
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]
    schedule: Callable[[float, int], float]
    words: tuple[str, str]
    norm: bool = False
    std: float | None = None
    seed: int = 0

    def rate(self, passed: float) -> float:
        """Return the learning rate after so many passes."""
        return self.lr * self.schedule(passed, self.epochs)

    def order(self, epoch: int, count: int) -> Int64[Tensor, " n"]:
        """Return the order of the training images in a pass."""
        return torch.randperm(count, generator=generator("linear probe", "order", self.seed, epoch))

    def start(self, dim: int, classes: int) -> nn.Sequential:
        """Return an untrained classifier."""
        random, linear = generator("linear probe", "weights", self.seed), nn.Linear(dim, classes)
        with torch.no_grad():
            if self.std is None:
                both = torch.empty(classes, dim + 1).uniform_(-(dim**-0.5), dim**-0.5, generator=random)
                linear.weight.copy_(both[:, :-1])
                linear.bias.copy_(both[:, -1])
            else:
                nn.init.trunc_normal_(linear.weight, std=self.std, generator=random)
                linear.bias.zero_()
        return nn.Sequential(*([nn.BatchNorm1d(dim, eps=1e-6)] if self.norm else []), linear)

    def passes(
        self,
        train: Callable[[int], Float[Tensor, "m n d"]],
        labels: Int64[Tensor, " n"],
        classes: int,
        device: torch.device,
    ) -> Iterator[list[nn.Sequential]]:
        """Train a classifier of each layer on `device`; yield them after each pass, to be judged but not kept.

        Args:
            train: the features of the training images in a pass, 0 to epochs - 1, float32 on any device.
            labels: their classes.
            classes: number of classes.
            device: where the classifiers are trained.
        """
        models = None
        for epoch in range(self.epochs):
            x = train(epoch)
            if models is None:
                models = [self.start(x.shape[2], classes).to(device) for _ in x]
                optimizer = self.optimizer([p for model in models for p in model.parameters()], self.lr)
            parts = self.order(epoch, len(labels)).split(self.batch_size)
            for step, part in enumerate(parts):
                if self.norm and len(part) == 1:
                    continue
                for group in optimizer.param_groups:
                    group["lr"] = self.rate(epoch + step / len(parts))
                self._step(models, optimizer, x[:, part.to(x.device)].to(device), labels[part.to(labels.device)])
            yield models

    @torch.enable_grad()
    def _step(self, models: list[nn.Sequential], optimizer: Optimizer, x: Tensor, labels: Tensor) -> None:
        labels = labels.to(x.device)
        with without_autocast(x):
            # The sum over layers of their mean losses: each has the gradient that it has alone.
            torch.stack([cross_entropy(model(y), labels) for model, y in zip(models, x, strict=True)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def about(self) -> dict[str, Any]:
        """Return the settings for reports, as plain values."""
        return {
            "classifier": "linear behind a batch norm with weights" if self.norm else "linear, no norm",
            "optimizer": self.words[0].format(lr=self.lr),
            "schedule": self.words[1],
            "epochs": self.epochs,
            "batch": self.batch_size,
            "augmentation": "none",
            "seed": self.seed,
        }


@torch.no_grad()
def accuracies(
    models: list[nn.Sequential], test: Float[Tensor, "m n2 d"], labels: Int64[Tensor, " n2"], device: torch.device
) -> Float64[Tensor, " m"]:
    """Return the accuracy of each layer's classifier, on `device`, on its test features; on the CPU."""
    right = []
    for model, x in zip(models, test, strict=True):
        with without_autocast(x.to(device)):
            guesses = [model.eval()(part.to(device)).argmax(dim=1).cpu() for part in x.split(CHUNK)]
        model.train()
        right.append((torch.cat(guesses) == labels.cpu()).double().mean())
    return torch.stack(right)


def _half_cosine(share: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * share))


def _after_warmup(passed: float, epochs: int) -> float:
    """Return MAE's rate: 10 of 90 passes of linear warm-up, then half a cosine to 0."""
    warmup = epochs / 9
    return passed / warmup if passed < warmup else _half_cosine((passed - warmup) / (epochs - warmup))


# The probe of the paper's ImageNet-100 numbers (Tables 2 and 3; App. A.2 and the authors' code, which sets the rate
# after each pass from the number of the one that ended, so that the first two have the full one).
IN100 = LinearProbe(
    epochs=200,
    batch_size=1024,
    lr=1e-2,
    optimizer=partial(AdamW, weight_decay=0.01),
    schedule=lambda passed, epochs: _half_cosine(max(0, int(passed) - 1) / epochs),
    words=(
        "AdamW, lr {lr:g}, weight decay 0.01, betas 0.9, 0.999",
        "cosine to 0, set after each epoch as the authors do: the first two have the full rate",
    ),
)
# DDAE's code: a bare linear layer, a rate of 1e-3 times the number of GPUs, 128 images a GPU.
DDAE = LinearProbe(
    epochs=15,
    batch_size=128,
    lr=1e-3,
    optimizer=Adam,
    schedule=lambda passed, epochs: _half_cosine(int(passed) / epochs),
    words=("Adam, lr {lr:g}", "cosine to 0, set after each pass"),
)
# REPA: MAE's recipe (0.1 for 256 images, 6.4 for 16384), behind a batch norm with weights, as its authors say.
REPA = LinearProbe(
    epochs=90,
    batch_size=16_384,
    lr=6.4,
    optimizer=LARS,
    schedule=_after_warmup,
    words=("LARS, lr {lr:g}, momentum 0.9, trust 0.001", "warm-up of a ninth of the steps, then cosine to 0"),
    norm=True,
    std=0.01,
)
