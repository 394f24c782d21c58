"""Linear probes on frozen features: how well a linear map reads the class, for many layers and noise levels.

m = cells (layer, noise level), n and n2 = training and test samples, d = features, k = classes. The regularisation, and
the best cell, are chosen on a held-out part of the training samples; the test set is only reported on.
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


def ridge_probe(
    train: Cells, train_labels: Labels, test: Float[Tensor, "m n2 d"], test_labels: Int64[Tensor, " n2"]
) -> ProbeScores:
    """Least-squares classifiers on one-hot targets in closed form, in float64.

    The ridge is chosen for each cell on a held-out fifth of the training samples; then all of them are used.
    """
    targets = torch.nn.functional.one_hot(train_labels, int(train_labels.max()) + 1).double()
    order = torch.randperm(len(train_labels), generator=generator("probe")).to(train.device)
    held, kept = order.tensor_split([round(HELD_OUT * len(order))])
    ridges = torch.tensor(RIDGES, dtype=torch.float64, device=train.device)

    rows = []
    for cell, unseen in zip(train.double(), test.double(), strict=True):
        x, x_held = _standardised(cell[kept], cell[held])
        held_out = _accuracy(x_held, _weights(x, targets[kept], ridges), train_labels[held])
        best = held_out.argmax()
        x, x_test = _standardised(cell, unseen)
        test_accuracy = _accuracy(x_test, _weights(x, targets, ridges[best, None]), test_labels)[0]
        rows.append(torch.stack([held_out[best], test_accuracy, ridges[best]]))
    return ProbeScores(*torch.stack(rows).T)


def _standardised(train: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Zero mean and unit variance over the training samples, and a column of ones for the bias."""
    mean, std = train.mean(dim=0), train.std(dim=0).clamp(min=1e-6)
    train, other = (torch.nn.functional.pad((x - mean) / std, (0, 1), value=1.0) for x in (train, other))
    return train, other


def _weights(x: Tensor, y: Tensor, ridges: Tensor) -> Tensor:
    """(X'X / n + ridge I)^-1 X'Y / n for every ridge, (ridges, d + 1, k); the bias is not penalised."""
    penalty = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    penalty[-1, -1] = 0.0
    gram = x.T @ x / len(x) + ridges[:, None, None] * penalty
    return torch.linalg.solve(gram, (x.T @ y / len(x)).expand(len(ridges), -1, -1))


def _accuracy(x: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    return ((x @ weights).argmax(dim=-1) == labels).double().mean(dim=1)


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
