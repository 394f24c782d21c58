"""Linear probes on frozen features: how well a linear map reads the class, for many layers and noise levels at once.

m = cells (layer, noise level), n = samples, d = features, k = classes. The regularisation, and the best cell, are chosen
on a held-out part of the training samples; the test set is only reported on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.randomness import generator

Cells = Float[Tensor, "m n d"]
Labels = Int64[Tensor, " n"]

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
HELD_OUT = 0.2


@dataclass(frozen=True)
class ProbeScores:
    """For each cell: accuracy on the held-out part, accuracy on the test set, and the chosen ridge."""

    held_out: Float[Tensor, " m"]
    test: Float[Tensor, " m"]
    ridge: Float[Tensor, " m"]


def _standardised(train: Tensor, *others: Tensor) -> list[Tensor]:
    """Zero mean and unit variance over the training samples, and a column of ones for the bias."""
    mean, std = train.mean(dim=1, keepdim=True), train.std(dim=1, keepdim=True).clamp(min=1e-6)
    return [torch.nn.functional.pad((x - mean) / std, (0, 1), value=1.0) for x in (train, *others)]


def _weights(x: Tensor, y: Tensor, ridge: Tensor) -> Tensor:
    """(X'X / n + ridge I)^-1 X'Y / n for every cell; the bias is not penalised."""
    n, width = x.shape[1:]
    penalty = torch.eye(width, dtype=x.dtype, device=x.device)
    penalty[-1, -1] = 0.0
    gram = x.mT @ x / n + ridge[:, None, None] * penalty
    return torch.linalg.solve(gram, x.mT @ y.expand(len(x), -1, -1) / n)


def _accuracy(x: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    return ((x @ weights).argmax(dim=-1) == labels).double().mean(dim=1)


def ridge_probe(train: Cells, train_labels: Labels, test: Cells, test_labels: Labels) -> ProbeScores:
    """Least-squares classifiers on one-hot targets in closed form, all cells batched, in float64.

    The ridge is chosen for each cell on a held-out fifth of the training samples; then all of them are used.
    """
    classes = int(train_labels.max()) + 1
    targets = torch.nn.functional.one_hot(train_labels, classes).double()
    order = torch.randperm(len(train_labels), generator=generator("probe")).to(train.device)
    held, kept = order.tensor_split([round(HELD_OUT * len(order))])
    ridges = torch.tensor(RIDGES, dtype=torch.float64, device=train.device)

    held_out = torch.stack([_sweep(cell[None].double(), targets, train_labels, kept, held) for cell in train])
    best = held_out.argmax(dim=1)
    test_scores = []
    for cell, unseen, choice in zip(train, test, best, strict=True):
        x, x_test = _standardised(cell[None].double(), unseen[None].double())
        test_scores.append(_accuracy(x_test, _weights(x, targets, ridges[choice, None]), test_labels))
    return ProbeScores(held_out.gather(1, best[:, None])[:, 0], torch.cat(test_scores), ridges[best])


def _sweep(cell: Tensor, targets: Tensor, labels: Tensor, kept: Tensor, held: Tensor) -> Tensor:
    """Held-out accuracy of one cell (1, n, d) at every ridge, from one eigendecomposition's worth of work each."""
    x, x_held = _standardised(cell[:, kept], cell[:, held])
    ridges = torch.tensor(RIDGES, dtype=torch.float64, device=cell.device)
    weights = _weights(x.expand(len(ridges), -1, -1), targets[kept], ridges)
    return _accuracy(x_held.expand(len(ridges), -1, -1), weights, labels[held])


def logistic_probe(
    train: Float[Tensor, "n d"], train_labels: Labels, test: Float[Tensor, "n2 d"], test_labels: Int64[Tensor, " n2"]
) -> float:
    """Test accuracy of scikit-learn's converged logistic regression on standardised features of one cell."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    classifier.fit(train.cpu().numpy(), train_labels.cpu().numpy())
    return float(classifier.score(test.cpu().numpy(), test_labels.cpu().numpy()))
