"""k-nearest-neighbour classification by cosine similarity (DINO, Caron et al., 2021).

    class of x = argmax_c sum_(i in the k nearest) [y_i = c] exp(cos(x, x_i) / T)

m = grid points (layer, noise level), n and n2 = training and test samples, d = features.
"""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize

from uvit_decay.representations.logistic import check_cells
from uvit_decay.runtime.precision import without_autocast
from uvit_decay.terminal.typed import Positive, Within, check_types

SIMILARITIES = 2**24  # entries of a chunk of the similarity matrix: 64 MiB
CHUNK = 4096  # training samples at a time at most


@check_types
def knn_accuracy(
    train: Float[Tensor, "m n d"],
    train_labels: Int64[Tensor, " n"],
    test: Float[Tensor, "m n2 d"],
    test_labels: Int64[Tensor, " n2"],
    k: Positive = 20,
    temperature: Annotated[float, Within("(0, inf)")] = 0.07,
    uniform: bool = False,
    centred: bool = False,
) -> Float64[Tensor, " m"]:
    """Return the test accuracy of each grid point, on the CPU.

    Args:
        train: training samples, on any device.
        train_labels: class of every training sample.
        test: test samples, on the device that computes.
        test_labels: class of every test sample.
        k: number of neighbours.
        temperature: T of DINO's votes exp(similarity / T).
        uniform: one vote for each neighbour, instead of DINO's weights.
        centred: take cosines around the mean of the grid point's training samples.
    """
    check_cells(train, train_labels, test, test_labels)
    nearest = []
    for x, y in zip(train, test, strict=True):
        if centred:
            mean = x.mean(dim=0)
            x, y = x - mean, y - mean.to(y)
        nearest.append(find_neighbours(x, y, k))
    device = nearest[0][0].device
    # A copy to the CPU must have ended before it is read; an accelerator orders copies and work by itself.
    labels = train_labels.to(device, non_blocking=device.type != "cpu")
    # First the neighbours of all grid points, then the votes, which make the host wait for an accelerator.
    guesses = [vote(similar, labels[index], temperature, uniform) for similar, index in nearest]
    right = torch.stack(guesses).cpu() == test_labels.cpu()
    return right.double().mean(dim=1)


@torch.no_grad()
def find_neighbours(
    train: Float[Tensor, "n d"],
    test: Float[Tensor, "n2 d"],
    k: int,
) -> tuple[Float[Tensor, "n2 k"], Int64[Tensor, "n2 k"]]:
    """Return similarities and indices of the k nearest training samples, nearest first.

    Among equally near samples, torch.topk decides which are returned, and in which order. The choice is unspecified and
    may depend on the device. Ties in the votes go to the smallest class, see `vote`.
    Besides the results, which are on the device of the test samples, this needs about 3 SIMILARITIES floats.
    """
    test = normalize(test.float(), dim=-1)
    n2 = len(test)
    width = max(1, SIMILARITIES // max(1, n2))
    width = min(CHUNK, width)
    near = test.new_empty(n2, 0)
    index = torch.empty(n2, 0, dtype=torch.int64, device=test.device)
    for start in range(0, len(train), width):
        x = train[start : start + width].to(test, non_blocking=test.device.type != "cpu")
        x = normalize(x, dim=-1)
        with without_autocast(x):
            similar = test @ x.T
        nearest = similar.topk(min(k, similar.shape[1]), dim=1)
        near = torch.cat([near, nearest.values], dim=1)
        index = torch.cat([index, start + nearest.indices], dim=1)
        near, order = near.topk(min(k, near.shape[1]), dim=1)
        index = index.gather(1, order)
    return near, index


def vote(
    similar: Float[Tensor, "n2 k"],
    labels: Int64[Tensor, "n2 k"],
    temperature: float = 0.07,
    uniform: bool = False,
) -> Int64[Tensor, " n2"]:
    """Return the class with most votes exp(similarity / temperature), or `uniform` votes; ties go to the smallest."""
    if uniform:
        weights = torch.ones_like(similar)
    else:
        nearest = similar.amax(dim=1, keepdim=True)
        weights = ((similar - nearest) / temperature).exp()  # at most 1: small temperatures do not overflow
    classes = int(labels.max()) + 1
    votes = similar.new_zeros(len(similar), classes, dtype=torch.float64)
    by_neighbour = zip(labels.split(1, dim=-1), weights.double().split(1, dim=-1), strict=True)
    for label, weight in by_neighbour:  # one neighbour at a time: the same rounding on every device
        votes.scatter_add_(-1, label, weight)
    return votes.argmax(dim=-1)
