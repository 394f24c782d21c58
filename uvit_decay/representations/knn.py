"""k-nearest-neighbour classification by cosine similarity (DINO, Caron et al., 2021), streaming over training samples.

    class of x = argmax_c sum_(i in the k nearest) [y_i = c] exp(cos(x, x_i) / T)

m = cells (layer, noise level), n and n2 = training and test samples, d = features.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize

from uvit_decay.nn.embed import without_autocast
from uvit_decay.runtime.errors import UserError

SIMILARITIES = 2**24  # entries of a chunk of the similarity matrix: 64 MiB


class NearestNeighbours:
    """The k nearest training samples of every test sample, for several cells; training samples arrive in chunks.

    Stores the test samples and their neighbours, 12 m n2 k bytes, and about 3 SIMILARITIES floats during an update.
    Of equally near training samples the first ones are kept.

    Args:
        test: test samples, float32 or a narrower dtype; the work is done on their device.
        k: number of neighbours.
    """

    def __init__(self, test: Float[Tensor, "m n2 d"], k: int = 20) -> None:
        self.test, self.k = normalize(test.float(), dim=-1), k
        self.near: Float[Tensor, "m n2 seen"] = self.test.new_empty(*test.shape[:2], 0)
        self.labels: Int64[Tensor, "m n2 seen"] = torch.empty_like(self.near, dtype=torch.int64)

    @torch.no_grad()
    def update(self, train: Float[Tensor, "m b d"], labels: Int64[Tensor, " b"]) -> None:
        """Update the neighbours with the next chunk of training samples, for all cells."""
        width = max(1, SIMILARITIES // max(1, self.test.shape[1]))
        labels = labels.to(self.test.device, non_blocking=True)
        for x, y in zip(train.split(width, dim=1), labels.split(width), strict=True):
            merged = [self._merged(m, x[m].to(self.test, non_blocking=True), y) for m in range(len(x))]
            self.near, self.labels = (torch.stack(side) for side in zip(*merged, strict=True))

    def _merged(self, m: int, x: Float[Tensor, "b d"], y: Int64[Tensor, " b"]) -> tuple[Tensor, Tensor]:
        """Return the neighbours of cell m among the previous ones and x, nearest first."""
        with without_autocast(x):
            similar, index = _nearest(self.test[m] @ normalize(x, dim=-1).T, self.k)
        similar = torch.cat([self.near[m], similar], dim=1)
        labels = torch.cat([self.labels[m], y[index]], dim=1)
        similar, order = similar.sort(dim=1, descending=True, stable=True)
        return similar[:, : self.k], labels.gather(1, order)[:, : self.k]

    def predict(self, temperature: float = 0.07, uniform: bool = False) -> Int64[Tensor, "m n2"]:
        """Vote for the class by exp(similarity / temperature), or by `uniform` votes; ties give the smallest class."""
        if self.near.shape[-1] < self.k:
            raise UserError(f"{self.k} nearest neighbours need as many training samples, got {self.near.shape[-1]}")
        weights = torch.ones_like(self.near) if uniform else (self.near / temperature).exp()
        votes = self.near.new_zeros(*self.near.shape[:2], int(self.labels.max()) + 1, dtype=torch.float64)
        for label, weight in zip(self.labels.split(1, dim=-1), weights.double().split(1, dim=-1), strict=True):
            votes.scatter_add_(-1, label, weight)  # one neighbour at a time, for the same rounding on every device
        return votes.argmax(dim=-1)


def knn_accuracy(
    train: Iterable[Float[Tensor, "m _ d"]],
    train_labels: Int64[Tensor, " n"],
    test: Float[Tensor, "m n2 d"],
    test_labels: Int64[Tensor, " n2"],
    k: int = 20,
    temperature: float = 0.07,
    uniform: bool = False,
) -> Float64[Tensor, " m"]:
    """Return the test accuracy of each cell, on the CPU.

    Args:
        train: chunks of training samples, such as `features.split(4096, dim=1)`, in the order of their labels.
        train_labels: class of every training sample.
        test: test samples; the work is done on their device.
        test_labels: class of every test sample.
        k: number of neighbours.
        temperature: T of DINO's votes exp(similarity / T).
        uniform: one vote for each neighbour, instead of DINO's weights.
    """
    neighbours, count = NearestNeighbours(test, k), 0
    for chunk in train:
        neighbours.update(chunk, train_labels[count : count + chunk.shape[1]])
        count += chunk.shape[1]
    if count != len(train_labels):
        raise UserError(f"{count} training samples but {len(train_labels)} labels")
    return (neighbours.predict(temperature, uniform).cpu() == test_labels.cpu()).double().mean(dim=1)


def _nearest(similar: Float[Tensor, "n2 b"], k: int) -> tuple[Float[Tensor, "n2 j"], Int64[Tensor, "n2 j"]]:
    """Return the j = min(k, b) largest values of each row and their indices; of equal values those of lowest index.

    topk does not specify which of equal values it returns, so rows with a further value equal to the smallest one
    returned are sorted instead. Results are ordered by index, so that a later stable sort keeps ties in that order.
    """
    k = min(k, similar.shape[1])
    index = similar.topk(k, dim=1).indices.sort(dim=1).values
    values = similar.gather(1, index)
    tied = (similar >= values.amin(dim=1, keepdim=True)).sum(dim=1) > k
    if tied.any():
        order = similar[tied].sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
        index[tied] = order
        values[tied] = similar[tied].gather(1, order)
    return values, index
