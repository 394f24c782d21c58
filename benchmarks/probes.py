"""The grid of linear probes over layers and noise levels of the bundled network, beside scikit-learn in a loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from benchmarks.cases import Agreement, Case, Compared, Setting
from uvit_decay.checkpoint import load
from uvit_decay.data.named import open_data
from uvit_decay.representations.logistic import HELD_OUT, L2_GRID, logistic_grid
from uvit_decay.representations.probe_options import TIMES, Probing
from uvit_decay.representations.probing import Prober

CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / "digits.safetensors"
TOLERANCE = 0.02  # of the accuracies, on average over the grid points

Features = tuple[Tensor, Tensor, Tensor, Tensor]  # training (cells, n, d), labels (n,), test, labels


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the grid beside one fit of scikit-learn per grid point, and beside its sweep over the same penalties."""
    warnings.filterwarnings("ignore", module="sklearn")
    data = standardised(*features(CHECKPOINT, "digits", setting.size(1400, 1400, 200), 350))
    if setting.quick:
        data = data[0][:4], data[1], data[2][:4], data[3]
    on_device = [part.to(setting.device) for part in data]
    found = logistic_grid(*on_device, device=setting.device)
    wanted = scikit_learn(*data, [1.0])
    off = (found.every_test[:, L2_GRID.index(1.0)] - wanted[:, 0]).abs().mean().item()
    ours = partial(logistic_grid, *on_device, device=setting.device)
    for name, plain in (
        ("one penalty in the loop", partial(scikit_learn, *data, [1.0])),
        (f"choice of {len(L2_GRID)} penalties in the loop", partial(sweep, *data, L2_GRID)),
    ):
        compared = [Compared("float32", "ours", "plain", Agreement(off, TOLERANCE))]
        yield Case(f"probes, {name}", len(wanted), {"ours": ours, "plain": plain}, compared, 5)


def features(ckpt: Path, data: str, max_train: int, max_test: int) -> Features:
    """Return float32 features (levels * layers, n, d) and labels (n,), of training and test images."""
    found = load(ckpt)
    images = open_data(data, None, found.net.image_size, found.net.channels)
    prober = Prober(found.net, found.path, images, Probing(max_train=max_train, max_test=max_test), torch.device("cpu"))
    levels = [prober.cells(level) for level in range(len(TIMES))]
    train, test = torch.cat([level.train(0) for level in levels]), torch.cat([level.test for level in levels])
    return train, levels[0].labels, test, levels[0].test_labels


def standardised(train: Tensor, y: Tensor, test: Tensor, y2: Tensor) -> Features:
    """Return the features with the mean and deviation of each grid point's training samples removed."""
    mean, std = train.mean(dim=1, keepdim=True), train.std(dim=1, correction=0, keepdim=True)
    return (train - mean) / std, y, (test - mean) / std, y2


def scikit_learn(train: Tensor, y: Tensor, test: Tensor, y2: Tensor, penalties: Sequence[float]) -> Tensor:
    """Return test accuracies (cells, penalties) of one fit each."""
    accuracies = [
        [LogisticRegression(C=1 / l2, max_iter=5000).fit(x, y.numpy()).score(x2, y2.numpy()) for l2 in penalties]
        for x, x2 in zip(train.numpy(), test.numpy(), strict=True)
    ]
    return torch.tensor(accuracies, dtype=torch.float64)


def sweep(train: Tensor, y: Tensor, test: Tensor, y2: Tensor, penalties: Sequence[float]) -> Tensor:
    """Choose each grid point's penalty on held-out samples, fit all samples; return the chosen test accuracies."""
    first = round(HELD_OUT * len(y))
    held_out = scikit_learn(train[:, first:], y[first:], train[:, :first], y[:first], penalties)
    every = scikit_learn(train, y, test, y2, penalties)
    return every.gather(1, held_out.argmax(dim=1, keepdim=True))
