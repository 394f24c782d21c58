"""Published protocols that judge frozen features by classification, by name.

All of them work on the same cached features of clean, un-augmented images; each says in its result everything that was
chosen. A protocol is added by an entry in PROTOCOLS and its name in `options.ProtocolName`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.nn.intermediates import Pool
from uvit_decay.representations.effective_rank import effective_rank, mean_share
from uvit_decay.representations.grid import SCORES
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.linear_probes import DDAE, IN100, REPA, Features, LinearProbe, accuracies
from uvit_decay.representations.logistic import L2_GRID, fitted_accuracy, logistic_grid
from uvit_decay.representations.options import Classification, ProbeProtocolName, Probing
from uvit_decay.representations.reference import Neighbourhood, Reference, cknna
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


CHUNK = 4096  # training samples compared with the test samples at a time
Scores = dict[str, Float[Tensor, " layers"]]  # float64, in the order of a protocol's `scores`


@dataclass(frozen=True)
class Cells:
    """Features of some layers at one noise level under one draw of the noise, float32 (layers, n, d), on the CPU.

    Args:
        train: those of the training images in a pass over them; every pass has noise of its own, of which 0 is the one
            of protocols with a single noise an image. A call is a pass of the network, unless the images are clean.
        labels: classes of the training images, 0 to `classes` - 1.
        test: those of the test images.
        test_labels: their classes.
        ranked: features of the test images whose ranks are computed: their class tokens, or `test`.
        classes: number of classes.
        device: where to compute.
        reference: the features of another network to align with; None where there is none.
    """

    train: Callable[[int], Float[Tensor, "layers n d"]]
    labels: Int64[Tensor, " n"]
    test: Float[Tensor, "layers n2 d"]
    test_labels: Int64[Tensor, " n2"]
    ranked: Float[Tensor, "layers n2 d"]
    classes: int
    device: torch.device
    reference: Reference | None


@dataclass(frozen=True)
class ProbeProtocol:
    """A protocol.

    Args:
        judge: the computation.
        scores: names of its scores; `test_accuracy`, in [0, 1], is among them.
        chosen_by: the score by which the best cell is chosen. By `test_accuracy` its number is too high.
        probe: how the classifier is trained, if step by step.
        fresh: every pass over the training images has noise of its own.
    """

    judge: Callable[[Cells, Probing], Scores]
    scores: tuple[str, ...]
    chosen_by: Literal["held_out_accuracy", "test_accuracy"]
    probe: LinearProbe | None = None
    fresh: bool = False

    @property
    def aligned(self) -> bool:
        """Return whether it needs a reference."""
        return "cknna" in self.scores

    def about(self, options: Probing) -> dict[str, Any]:
        """Return its settings for reports, as plain values."""
        chosen = "test images: too high" if self.chosen_by == "test_accuracy" else "a held-out fifth of the training"
        known = {"best_cell_chosen_on": chosen}
        if self.probe is not None:
            return {**_asked(self.probe, options).about(), **known}
        vote = "equal votes" if options.uniform else "votes exp(similarity / 0.07)"
        classifier = "logistic regression, l2 penalty chosen on a held-out fifth of the training images"
        return {"classifier": classifier, "knn": f"cosine, {vote}", **known}


def paper(cells: Cells, options: Probing) -> Scores:
    """Judge by logistic regression, nearest neighbours and rank, with one noise for each image."""
    train = cells.train(0)
    linear = logistic_grid(train, cells.labels, cells.test, cells.test_labels, device=cells.device)
    vote = {"k": options.neighbours, "uniform": options.uniform}
    knn = knn_accuracy(train.split(CHUNK, dim=1), cells.labels, cells.test.to(cells.device), cells.test_labels, **vote)
    columns = (linear.held_out, linear.test, linear.every_test.amax(1), linear.l2, knn)
    columns = (*columns, *_ranks(cells), mean_share(cells.test))
    return dict(zip(SCORES, columns, strict=True))


def ddae(cells: Cells, options: Probing) -> Scores:
    """Judge by a linear classifier that sees the training images with new noise in every pass.

    Xiang, Yang, Huang, Wang 2023, "Denoising Diffusion Autoencoders are Unified Self-supervised Learners": every layer
    and noise level, the best on the test images. The random crops and flips of its code are left out, as not every data
    set allows them.
    """
    return {"test_accuracy": _accuracy(cells, options, DDAE, cells.train)}


def repa(cells: Cells, options: Probing) -> Scores:
    """Judge by a linear classifier and by CKNNA with a reference, see `alignment`.

    Yu et al. 2025, "Representation Alignment for Generation": linear probes and CKNNA by layer and noise level. The
    classifier sees features of un-augmented images with one noise each, extracted once.
    """
    train = cells.train(0)
    device = "cpu" if cells.device.type == "mps" else cells.device  # Apple's GPUs lack float64
    theirs = Neighbourhood.of(cells.reference.features.to(device))
    ours = (Neighbourhood.of(x[cells.reference.rows].to(device)) for x in cells.test)
    alignment = torch.stack([cknna(x, theirs) for x in ours]).cpu()
    return {"test_accuracy": _accuracy(cells, options, REPA, lambda _: train), "cknna": alignment}


def _asked(probe: LinearProbe, options: Probing) -> LinearProbe:
    return replace(probe, epochs=options.epochs or probe.epochs, seed=options.seed)


def _accuracy(cells: Cells, options: Probing, probe: LinearProbe, train: Callable[[int], Tensor]) -> Tensor:
    *_, models = _asked(probe, options).passes(train, cells.labels, cells.classes, cells.device)
    return accuracies(models, cells.test, cells.test_labels, cells.device)


def _ranks(cells: Cells) -> tuple[Tensor, Tensor]:
    """Return the effective rank of test features as the paper defines it, and as a number of dimensions."""
    test = cells.ranked.to("cpu" if cells.device.type == "mps" else cells.device)  # Apple's GPUs lack float64
    literal = [effective_rank(cell) for cell in test]
    return torch.tensor(literal), torch.tensor([effective_rank(cell, "feature", exp=True) for cell in test])


PROBE_PROTOCOLS: dict[ProbeProtocolName, ProbeProtocol] = {
    "paper": ProbeProtocol(paper, SCORES, "held_out_accuracy"),
    "ddae": ProbeProtocol(ddae, ("test_accuracy",), "test_accuracy", DDAE, fresh=True),
    "repa": ProbeProtocol(repa, ("test_accuracy", "cknna"), "test_accuracy", REPA),
}
