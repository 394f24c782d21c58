"""Published protocols that judge frozen features by classification, by name.

All of them work on the same cached features of clean, un-augmented images; each says in its result everything that was
chosen. A protocol is added by an entry in PROTOCOLS and its name in `options.ProtocolName`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from uvit_decay.nn.intermediates import Pool
from uvit_decay.representations.extraction import Features
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.linear_probes import IN100, accuracies
from uvit_decay.representations.logistic import L2_GRID, fitted_accuracy, logistic_grid
from uvit_decay.representations.options import Classification
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import generator

SHOT_L2 = 1.0  # penalty of few-shot classifiers, in units of scikit-learn's 1 / C, whose default it is


@dataclass(frozen=True)
class Outcome:
    """Results of a protocol, accuracies in [0, 1] first, and what they depend on besides the features."""

    values: Mapping[str, float]
    chosen: Mapping[str, Any]


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    Args:
        pool: how tokens are pooled unless the user says otherwise.
        judge: the computation.
        check: raises a UserError for training labels (n,), with the names of the classes, that do not suffice.
    """

    pool: Pool
    judge: Callable[[Features, Classification], Outcome]
    check: Callable[[Int64[Tensor, " n"], Sequence[str], Classification], None]


def in100_linear(features: Features, options: Classification) -> Outcome:
    """Judge by the paper's linear probe on ImageNet-100."""
    probe, device, test = replace(IN100, epochs=options.epochs, seed=options.seed), features.train.device, features.test
    passes = probe.passes(lambda _: features.train[None], features.train_labels, features.classes, device)
    found = [float(accuracies(models, test[None], features.test_labels, device)) for models in passes]
    best = max(range(len(found)), key=found.__getitem__)
    values = {"last": found[-1], "best_on_test": found[best]}
    return Outcome(
        values, {**probe.about(), "best_epoch": best + 1, "reported": "last; best_on_test is chosen on test"}
    )


def logistic(features: Features, _: Classification) -> Outcome:
    """Judge by logistic regression whose l2 penalty is chosen on a held-out fifth of the training images."""
    parts = features.train[None], features.train_labels, features.test[None], features.test_labels
    scores = logistic_grid(*parts, device=features.train.device, iterations=(60, 40))
    values = {"test": float(scores.test[0]), "held_out": float(scores.held_out[0])}
    values["best_on_test"] = float(scores.every_test.max())
    classifier = "logistic regression of standardised features, l2 penalty chosen on a held-out fifth of the training"
    return Outcome(values, {"classifier": classifier, "l2_grid": list(L2_GRID), "l2": float(scores.l2[0])})


def knn(features: Features, options: Classification) -> Outcome:
    """Judge by k nearest neighbours with cosine similarity (DINO)."""
    vote = {"k": options.neighbours, "temperature": options.temperature, "uniform": options.uniform}
    parts = [features.train[None]], features.train_labels, features.test[None], features.test_labels
    accuracy = knn_accuracy(*parts, **vote)
    weight = "1" if options.uniform else f"exp(similarity / {options.temperature:g})"
    chosen = {"classifier": "nearest neighbours", "k": options.neighbours, "T": options.temperature}
    return Outcome({"test": float(accuracy[0])}, {**chosen, "similarity": "cosine", "vote": weight})


def few_shot(features: Features, options: Classification, shots: int) -> Outcome:
    """Judge by logistic regression on `shots` training images of each class, several times."""
    accuracies = []
    for draw in range(options.draws):
        part = drawn(features.train_labels.cpu(), shots, options.seed, draw).to(features.train.device)
        train, labels = features.train[None, part], features.train_labels[part]
        accuracies.append(fitted_accuracy(train, labels, features.test[None], features.test_labels, SHOT_L2))
    each = torch.cat(accuracies)
    spread = float(each.std()) if len(each) > 1 else 0.0
    classifier = f"logistic regression of features standardised over the draw, l2 penalty {SHOT_L2:g} of scikit-learn's"
    chosen = {"classifier": classifier, "images_a_class": shots, "draws": options.draws, "seed": options.seed}
    return Outcome({"mean": float(each.mean()), "std": spread}, {**chosen, "each": each.tolist()})


def drawn(labels: Int64[Tensor, " n"], shots: int, seed: int, draw: int) -> Int64[Tensor, " chosen"]:
    """Return the indices of `shots` images of each class, class by class; fewer shots of a draw are part of more."""
    order = torch.randperm(len(labels), generator=generator("few-shot", seed, draw))
    of_class = [order[labels[order] == label][:shots] for label in labels.unique()]
    return torch.cat(of_class)


def check_any(labels: Int64[Tensor, " n"], names: Sequence[str], options: Classification) -> None:
    """Raise a UserError unless there are training images to hold some out."""
    if len(labels) < 5:
        raise UserError(f"a classifier needs five training images or more, got {len(labels)}")


def check_neighbours(labels: Int64[Tensor, " n"], names: Sequence[str], options: Classification) -> None:
    """Raise a UserError unless there are as many training images as neighbours."""
    if len(labels) < options.neighbours:
        raise UserError(f"{options.neighbours} nearest neighbours need as many training images, got {len(labels)}")


def check_shots(labels: Int64[Tensor, " n"], names: Sequence[str], options: Classification, shots: int) -> None:
    """Raise a UserError unless every class has as many training images as shots."""
    counts = labels.bincount(minlength=len(names))
    fewest = int(counts.argmin())
    if counts[fewest] < shots:
        count, name = int(counts[fewest]), names[fewest]
        raise UserError(f"few-shot-{shots} needs {shots} training images of each class, {name} has {count}")


PROTOCOLS: dict[str, Protocol] = {
    "in100-linear": Protocol("all", in100_linear, check_any),
    "logistic": Protocol("all", logistic, check_any),
    "knn": Protocol("mean", knn, check_neighbours),
    **{
        f"few-shot-{shots}": Protocol("mean", partial(few_shot, shots=shots), partial(check_shots, shots=shots))
        for shots in (1, 5, 10)
    },
}
