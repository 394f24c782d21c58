"""Linear classifiers of the features of many layers at once, trained by Adam behind a batch norm without weights.

So do DDAE and REPA read features (see `probe_protocols`). The layers' classifiers share the order of the images but no
weights, and Adam works by coordinate: each is trained as if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from uvit_decay.nn.embed import without_autocast
from uvit_decay.runtime.random import generator

Cells = Float[Tensor, "m n d"]
CHUNK = 4096  # test images judged at a time


class Classifiers(nn.Module):
    """A linear classifier of standardised features for each of m layers.

    Args:
        layers: m.
        dim: features of each.
        classes: number of classes.
        seed: seed of the initial weights, torch's of a linear layer, which are the same in all layers.
    """

    def __init__(self, layers: int, dim: int, classes: int, seed: int) -> None:
        super().__init__()
        bound, random = dim**-0.5, generator("adam probe", "weights", seed)
        start = torch.empty(dim + 1, classes).uniform_(-bound, bound, generator=random).repeat(layers, 1, 1)
        self.norm = nn.BatchNorm1d(layers * dim, affine=False)
        self.weight, self.bias = nn.Parameter(start[:, :-1].clone()), nn.Parameter(start[:, -1:].clone())

    def forward(self, x: Cells) -> Float[Tensor, "m n classes"]:
        """Return the logits of features."""
        standardised = self.norm(x.transpose(0, 1).flatten(1)).unflatten(1, x.shape[::2]).transpose(0, 1)
        return torch.baddbmm(self.bias, standardised, self.weight)


@dataclass(frozen=True)
class AdamProbe:
    """Adam without weight decay, its rate falling to 0 in half a cosine, set after each pass.

    Args:
        epochs: passes over the training images.
        batch_size: images in a batch; a last batch of a single image is left out.
        lr: learning rate.
        seed: seed of the initial weights and of the order.
    """

    epochs: int
    batch_size: int
    lr: float
    seed: int = 0

    @torch.enable_grad()
    def accuracies(
        self,
        train: Callable[[int], Cells],
        labels: Int64[Tensor, " n"],
        test: Float[Tensor, "m n2 d"],
        test_labels: Int64[Tensor, " n2"],
        classes: int,
        device: torch.device,
    ) -> Float64[Tensor, " m"]:
        """Train, and return the test accuracy of each layer after the last pass, on the CPU.

        Args:
            train: the features of the training images in a pass, 0 to epochs - 1, float32 on any device.
            labels: their classes.
            test: features of the test images.
            test_labels: their classes.
            classes: number of classes.
            device: where the classifiers are trained.
        """
        layers, _, dim = test.shape
        model = Classifiers(layers, dim, classes, self.seed).to(device)
        optimizer = torch.optim.Adam(model.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        with without_autocast(model.weight):
            for epoch in range(self.epochs):
                x = train(epoch)
                for part in self._batches(epoch, len(labels)):
                    optimizer.zero_grad()
                    logits, y = model(x[:, part].to(device)), labels[part].to(device)
                    # The sum over layers of their mean losses: each has the gradient that it has alone.
                    cross_entropy(logits.flatten(0, 1), y.repeat(layers), reduction="sum").div(len(part)).backward()
                    optimizer.step()
                schedule.step()
            return self._accuracy(model.eval(), test, test_labels, device)

    def _batches(self, epoch: int, count: int) -> list[Tensor]:
        order = torch.randperm(count, generator=generator("adam probe", "order", self.seed, epoch))
        return [part for part in order.split(self.batch_size) if len(part) > 1]

    @torch.no_grad()
    def _accuracy(self, model: Classifiers, test: Tensor, labels: Tensor, device: torch.device) -> Tensor:
        guesses = [model(x.to(device)).argmax(dim=2).cpu() for x in test.split(CHUNK, dim=1)]
        return (torch.cat(guesses, dim=1) == labels.cpu()).double().mean(dim=1)

    def about(self) -> str:
        """Return the settings in words."""
        return (
            f"linear behind a batch norm without weights, Adam, lr {self.lr:g}, cosine to 0, {self.epochs} passes, "
            f"batch {self.batch_size}"
        )
