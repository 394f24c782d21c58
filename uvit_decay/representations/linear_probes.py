"""Linear classifiers of frozen features, trained step by step as published protocols do.

The classifiers of several layers see the same images in the same order but share no weights, and every optimizer here
updates each tensor separately. So each classifier is trained as if it were alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, AdamW, Optimizer

from uvit_decay.runtime.optimizers import LARS
from uvit_decay.runtime.precision import without_autocast
from uvit_decay.runtime.random import generator
from uvit_decay.terminal.typed import Positive, Seed, Within, check_types

CHUNK = 4096  # test images at a time


@check_types
@dataclass(frozen=True)
class LinearProbe:
    """A way to train linear classifiers.

    Args:
        epochs: passes over the training images.
        batch_size: images in a batch; the last batch of a pass may be smaller. With `norm`, a last batch of one image
            is left out.
        lr: largest learning rate.
        optimizer: function (parameters, learning rate) -> optimizer.
        schedule: function (epochs done, total epochs) -> fraction of `lr`; epochs done may be fractional.
        words: optimizer and schedule for reports.
        norm: put a batch norm with weights before the linear layer.
        std: standard deviation of the initial weights, with biases of 0; None for torch's initialisation.
        seed: seed of the initial weights, which are the same for all layers, and of the order.
    """

    epochs: Positive
    batch_size: Positive
    lr: Annotated[float, Within("(0, inf)")]
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]
    schedule: Callable[[float, int], float]
    words: tuple[str, str]
    norm: bool = False
    std: Annotated[float | None, Within("[0, inf)")] = None
    seed: Seed = 0

    def configure(self, epochs: int | None, seed: int) -> LinearProbe:
        """Return this probe with another number of epochs, unless it is None, and a seed."""
        return replace(self, epochs=epochs or self.epochs, seed=seed)

    def rate(self, passed: float) -> float:
        """Return the learning rate after a number of passes, which may be fractional."""
        return self.lr * self.schedule(passed, self.epochs)

    def order(self, epoch: int, count: int) -> Int64[Tensor, " n"]:
        """Return the order of the training images in a pass."""
        return torch.randperm(count, generator=generator("linear probe", "order", self.seed, epoch))

    def start(self, dim: int, classes: int) -> nn.Sequential:
        """Return an untrained classifier."""
        random = generator("linear probe", "weights", self.seed)
        linear = nn.Linear(dim, classes)
        with torch.no_grad():
            if self.std is None:
                bound = dim**-0.5
                both = torch.empty(classes, dim + 1).uniform_(-bound, bound, generator=random)
                linear.weight.copy_(both[:, :-1])
                linear.bias.copy_(both[:, -1])
            else:
                nn.init.trunc_normal_(linear.weight, std=self.std, generator=random)
                linear.bias.zero_()
        if not self.norm:
            return nn.Sequential(linear)
        return nn.Sequential(nn.BatchNorm1d(dim, eps=1e-6), linear)

    def passes(
        self,
        train: Callable[[int], Float[Tensor, "m n d"]],
        labels: Int64[Tensor, " n"],
        classes: int,
        device: torch.device,
    ) -> Iterator[list[nn.Sequential]]:
        """Train a classifier for each layer; yield the classifiers after each pass. The next pass changes them.

        Args:
            train: function (number of the pass, 0 to epochs - 1) -> features of the training images, float32 on any
                device.
            labels: classes of the training images.
            classes: number of classes.
            device: device on which the classifiers are trained.
        """
        models = None
        for epoch in range(self.epochs):
            x = train(epoch)
            if models is None:
                models = [self.start(x.shape[2], classes).to(device) for _ in x]
                optimizer = self.optimizer(nn.ModuleList(models).parameters(), self.lr)
            batches = self.order(epoch, len(labels)).split(self.batch_size)
            for step, batch in enumerate(batches):
                if self.norm and len(batch) == 1:
                    continue
                for group in optimizer.param_groups:
                    group["lr"] = self.rate(epoch + step / len(batches))
                features = x[:, batch.to(x.device)].to(device)
                self._step(models, optimizer, features, labels[batch.to(labels.device)])
            yield models

    @torch.enable_grad()
    def _step(
        self,
        models: list[nn.Sequential],
        optimizer: Optimizer,
        features: Float[Tensor, "m b d"],
        labels: Int64[Tensor, " b"],
    ) -> None:
        """Make an optimizer step on the sum of the layers' mean losses, which gives each layer its own gradient."""
        labels = labels.to(features.device)
        with without_autocast(features):
            losses = [cross_entropy(model(x), labels) for model, x in zip(models, features, strict=True)]
            torch.stack(losses).sum().backward()
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
    models: list[nn.Sequential],
    test: Float[Tensor, "m n2 d"],
    labels: Int64[Tensor, " n2"],
    device: torch.device,
) -> Float64[Tensor, " m"]:
    """Return the test accuracy of each layer's classifier, on the CPU.

    Args:
        models: classifiers of the layers, on `device`; training mode is restored.
        test: features of the test images, on any device.
        labels: classes of the test images.
        device: device that computes.
    """
    accuracy = []
    for model, x in zip(models, test, strict=True):
        model.eval()
        guesses = []
        with without_autocast(x.to(device)):
            for chunk in x.split(CHUNK):
                guesses.append(model(chunk.to(device)).argmax(dim=1).cpu())
        model.train()
        right = torch.cat(guesses) == labels.cpu()
        accuracy.append(right.double().mean())
    return torch.stack(accuracy)


def _half_cosine(share: float) -> float:
    """Return 1 at share 0, falling as half a cosine to 0 at share 1."""
    return 0.5 * (1.0 + math.cos(math.pi * share))


def _after_warmup(passed: float, epochs: int) -> float:
    """Return MAE's rate: linear warm-up in a ninth of the passes (10 of 90), then half a cosine to 0."""
    warmup = epochs / 9
    if passed < warmup:
        return passed / warmup
    return _half_cosine((passed - warmup) / (epochs - warmup))


# The probe of the paper's ImageNet-100 numbers (Tables 2 and 3; App. A.2 and the authors' code, which sets the rate
# after each pass from the number of the finished pass, so that the first two passes have the full rate).
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
# DDAE's code: a bare linear layer, a rate of 1e-3 times the number of GPUs, 128 images per GPU.
DDAE = LinearProbe(
    epochs=15,
    batch_size=128,
    lr=1e-3,
    optimizer=Adam,
    schedule=lambda passed, epochs: _half_cosine(int(passed) / epochs),
    words=("Adam, lr {lr:g}", "cosine to 0, set after each pass"),
)
# REPA: MAE's recipe (rate 0.1 for 256 images, 6.4 for 16384), behind a batch norm with weights, as its authors say.
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
