"""Linear probes on frozen features: accuracy of a linear classifier for many layers and noise levels.

m = cells (layer, noise level), r = ridges (l2 strengths), n and n2 = training and test samples, d = features,
k = classes. The ridge and the best cell are chosen on a held-out part of the training samples; the test set is for
the reported accuracy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.representations.logistic import LOGITS, PAIRS, Frame, Logistic, minimised
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import generator

Cells = Float[Tensor, "m n d"]
Labels = Int64[Tensor, " n"]

GRID_RIDGES = (0.1, 1.0, 10.0)
HELD_OUT = 0.2
TOLERANCE = 1e-3
CELLS = 8  # cells in a chunk on a CPU: more exceed its caches, fewer have more overhead for each call


@dataclass(frozen=True)
class GridScores:
    """For each cell: accuracy on the held-out part and on the test set, and the ridge chosen on the held-out part.

    `every_test` is the test accuracy of each ridge. Its maximum over ridges and cells is the paper's number, "best on
    test"; it is selected on the test set, so it is too high and must be labelled as such.
    """

    held_out: Float[Tensor, " m"]
    test: Float[Tensor, " m"]
    ridge: Float[Tensor, " m"]
    every_test: Float[Tensor, "m r"]


@torch.no_grad()
def logistic_grid(
    train: Cells,
    train_labels: Labels,
    test: Float[Tensor, "m n2 d"],
    test_labels: Int64[Tensor, " n2"],
    ridges: Sequence[float] = GRID_RIDGES,
    device: torch.device | str = "cpu",
    budget: int = 2**30,
    iterations: tuple[int, int] = (8, 4),
) -> GridScores:
    """Fit logistic regressions for all cells and ridges at once, on features standardised for each cell, in float32.

    Every ridge is fitted to four fifths of the training samples and evaluated on the others. A second fit to all
    samples, initialised with the first, is evaluated on the test set. With the default iterations an accuracy differs
    from scikit-learn's at the same ridge by 0.4 points, on average over the cells of the bundled network
    (`benchmarks/probe_grid.py`), partly since early stopping helps cells that overfit. (60, 40) converges: 0.1 points.

    Args:
        train: features of the training samples.
        train_labels: class of every training sample.
        test: features of the test samples.
        test_labels: class of every test sample.
        ridges: candidates, in units of scikit-learn's 1 / C, whose default is 1; of equally good ones the first.
        device: device that computes, a chunk of cells at a time; the features may be on another one.
        budget: maximum bytes on `device` in addition to the arguments; a single cell, which needs about 8 n (d + k),
            may exceed it.
        iterations: maximum number of gradients of the first and of the second fit.

    Raises:
        UserError: fewer than five training samples, or no ridge.
    """
    n, n2, k = len(train_labels), len(test_labels), int(train_labels.max()) + 1
    if n < 5 or not ridges:
        raise UserError(f"a grid of probes needs five training samples and a ridge, got {n} and {len(ridges)}")
    device = torch.device(device)
    cells = max(1, budget // _cell_bytes(n, n2, train.shape[-1], k, len(ridges)))
    cells = min(cells, CELLS) if device.type == "cpu" else cells
    order = torch.randperm(n, generator=generator("probe")).to(device)
    y, y2 = train_labels.to(device)[order], test_labels.to(device)
    strengths = torch.tensor(ridges, dtype=torch.float32, device=device)
    rows = []
    with torch.autocast(device.type, enabled=False):
        for x, x2 in zip(train.split(cells), test.split(cells), strict=True):
            x = x.to(device, torch.float32)[:, order]
            held_out, start, axes = _held_out(x, y, strengths, k, iterations[0])
            frame = Frame.of(x, axes)
            w = minimised(Logistic(x, frame, y, strengths, k), start, iterations[1], TOLERANCE)
            rows.append((held_out, _accuracies(frame, x2.to(device, torch.float32), w, y2)))
    held_out, every_test = (torch.cat(side).cpu() for side in zip(*rows, strict=True))
    best = held_out.argmax(dim=1, keepdim=True)
    ridge = torch.tensor(ridges, dtype=torch.float64)[best[:, 0]]
    return GridScores(held_out.gather(1, best)[:, 0], every_test.gather(1, best)[:, 0], ridge, every_test)


def _held_out(x: Cells, y: Labels, ridges: Tensor, k: int, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fit to the last four fifths of the samples; return accuracies (m, r) on the first fifth, the weights and axes."""
    first = round(HELD_OUT * len(y))
    frame = Frame.of(x[:, first:])
    problem = Logistic(x[:, first:], frame, y[first:], ridges, k)
    w = minimised(problem, problem.start, iterations, TOLERANCE)
    return _accuracies(frame, x[:, :first], w, y[:first]), w, frame.axes


def _accuracies(frame: Frame, x: Cells, w: Float[Tensor, "m r k d1"], labels: Labels) -> Float[Tensor, "m r"]:
    """Return the accuracy of every cell and ridge on the samples x."""
    logits = (w.flatten(1, 2) @ frame.coordinates(x).mT).unflatten(1, w.shape[1:3])
    return (logits.max(dim=2).indices == labels).double().mean(dim=-1)


def _cell_bytes(n: int, n2: int, d: int, k: int, r: int) -> int:
    """Return the bytes of a cell: its samples and one-hot labels, both twice, test samples and logits, and L-BFGS."""
    samples = 2 * n * (d + 1 + k) + n2 * (2 * d + 1 + 2 * r * k + 2 * r)
    return 4 * (samples + (2 * PAIRS + 12) * r * k * (d + 1) + 3 * LOGITS)
