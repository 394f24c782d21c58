"""The linear probe of the paper's ImageNet-100 numbers (Tables 2 and 3): AdamW on cached features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from uvit_decay.representations.extraction import Features
from uvit_decay.runtime.random import generator


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier of features as they are, trained by AdamW (App. A.2 of the paper, and the authors' code).

    Its initial weights are torch's of a linear layer. As in the authors' code the rate is set after each epoch, so that
    the first two epochs have the full one: epoch e has lr (1 + cos(pi max(0, e - 1) / epochs)) / 2. The last batch of
    an epoch may be smaller.

    Args:
        epochs: passes over the training images.
        batch_size: images in a batch.
        lr: learning rate.
        weight_decay: of weights and biases; torch's default for AdamW.
        seed: seed of the initial weights and of the order.
    """

    epochs: int = 200
    batch_size: int = 1024
    lr: float = 1e-2
    weight_decay: float = 0.01
    seed: int = 0

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * max(0, epoch - 1) / self.epochs))

    def order(self, epoch: int, count: int) -> Tensor:
        """Return the order of the training images in an epoch."""
        return torch.randperm(count, generator=generator("linear probe", "order", self.seed, epoch))

    def start(self, classes: int, dim: int) -> Float[Tensor, "classes d1"]:
        """Return the initial weights, the bias last: uniform in +-1 / sqrt(dim), as torch's."""
        bound = dim**-0.5
        random = generator("linear probe", "weights", self.seed)
        return torch.empty(classes, dim + 1).uniform_(-bound, bound, generator=random)

    def accuracies(self, features: Features) -> Float[Tensor, " epochs"]:
        """Train, and return the test accuracy after each epoch."""
        x, labels = features.train, features.train_labels
        start = self.start(features.classes, x.shape[1]).to(x.device)
        weight, bias = (part.clone().requires_grad_() for part in (start[:, :-1], start[:, -1]))
        optimizer = torch.optim.AdamW([weight, bias], self.lr, weight_decay=self.weight_decay)
        accuracies = []
        for epoch in range(self.epochs):
            optimizer.param_groups[0]["lr"] = self.rate(epoch)
            for part in self.order(epoch, len(x)).to(x.device).split(self.batch_size):
                optimizer.zero_grad()
                cross_entropy(linear(x[part], weight, bias), labels[part]).backward()
                optimizer.step()
            with torch.no_grad():
                guesses = linear(features.test, weight, bias).argmax(dim=1)
            accuracies.append((guesses == features.test_labels).cpu().double().mean())
        return torch.stack(accuracies)

    def about(self) -> dict[str, Any]:
        """Return the settings for reports, as plain values."""
        return {
            "classifier": "linear, no norm",
            "optimizer": f"AdamW, lr {self.lr:g}, weight decay {self.weight_decay:g}, betas 0.9, 0.999",
            "schedule": "cosine to 0, set after each epoch as the authors do: the first two have the full rate",
            "epochs": self.epochs,
            "batch": self.batch_size,
            "augmentation": "none",
            "seed": self.seed,
        }
