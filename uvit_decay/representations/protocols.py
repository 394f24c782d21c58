"""Published protocols that judge frozen features, by name: of every layer and noise level, or of one of each.

All of them work on features of un-augmented images. A protocol is an entry of PROTOCOLS: those of `probe` evaluate a
grid of cells (layer, noise level), those of `classify` a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.nn.intermediates import Pool
from uvit_decay.representations.grid import SCORES
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.linear_probes import DDAE, IN100, REPA, LinearProbe, accuracies
from uvit_decay.representations.logistic import L2_GRID, fitted_accuracy, logistic_grid
from uvit_decay.representations.options import Classification, Probing
from uvit_decay.representations.rank import effective_rank, mean_share
from uvit_decay.representations.reference import Neighbourhood, Reference, cknna
from uvit_decay.runtime.command_line import did_you_mean
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import generator

SHOT_L2 = 1.0  # penalty of few-shot classifiers, in units of scikit-learn's 1 / C, whose default it is


@dataclass(frozen=True)
class Cells:
    """Features of some layers at one noise level under one draw of the noise, float32 (layers, n, d), on any device.

    Args:
        train: those of the training images in a pass over them; every pass has noise of its own, of which 0 is the one
            of protocols with a single noise an image. A call is a pass of the network, unless the images are clean.
        labels: classes of the training images, 0 to `classes` - 1.
        test: those of the test images.
        test_labels: their classes.
        classes: number of classes.
        device: where to compute.
        ranked: features of the test images whose ranks are computed: their class tokens, or `test`.
        reference: the features of another network to align with.
    """

    train: Callable[[int], Float[Tensor, "layers n d"]]
    labels: Int64[Tensor, " n"]
    test: Float[Tensor, "layers n2 d"]
    test_labels: Int64[Tensor, " n2"]
    classes: int
    device: torch.device
    ranked: Float[Tensor, "layers n2 d"] | None = None
    reference: Reference | None = None


@dataclass(frozen=True)
class Outcome:
    """Scores of the layers by name, float64 (layers,), and what those of a single cell depend on, as plain values."""

    values: Mapping[str, Float[Tensor, " layers"]]
    chosen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    Args:
        judge: the computation.
        scores: names of its scores.
            A protocol of a grid has `test_accuracy` among them, a protocol of a single cell has not.
        chosen_by: the score of `scores` by which the best cell of a grid is chosen. By `test_accuracy` its number is
            too high.
        probe: how the classifier is trained, if step by step.
        fresh: every pass over the training images has noise of its own.
        pool: how tokens are pooled unless the user says otherwise.
        votes: whether it needs as many training images as neighbours.
        shots: training images of each class that it needs.
        classifier: the classifier of a grid in words, for reports; that of `probe` has words of its own.

    Raises:
        UserError: the best cell is chosen by a score that the protocol of a grid has not.
    """

    judge: Callable[[Cells, Any], Outcome]
    scores: tuple[str, ...]
    chosen_by: Literal["held_out_accuracy", "test_accuracy"] = "test_accuracy"
    probe: LinearProbe | None = None
    fresh: bool = False
    pool: Pool = "mean"
    votes: bool = False
    shots: int = 0
    classifier: str = ""

    def __post_init__(self) -> None:
        if self.of_grid and self.chosen_by not in self.scores:
            raise UserError(f"a protocol with scores {', '.join(self.scores)} cannot choose by {self.chosen_by}")

    def check(self, labels: Int64[Tensor, " n"], names: Sequence[str], options: Classification | Probing) -> None:
        """Raise a UserError unless there are training images enough, of classes with these names."""
        least = max(5, options.neighbours if self.votes else 0)  # of which a fifth is held out
        if len(labels) < least:
            many = ", as many as neighbours" if least > 5 else ""
            raise UserError(f"{least} training images or more are needed{many}, got {len(labels)}")
        for count, name in zip(labels.bincount(minlength=len(names)).tolist(), names, strict=True):
            if count < self.shots:
                raise UserError(f"{self.shots} training images of each class are needed, {name} has {count}")

    @property
    def of_grid(self) -> bool:
        """Return whether it evaluates a grid of cells, as `evaluate.py probe` does."""
        return "test_accuracy" in self.scores

    @property
    def aligned(self) -> bool:
        """Return whether it needs a reference."""
        return "cknna" in self.scores

    def about(self, options: Probing) -> dict[str, Any]:
        """Return the settings of a grid for reports, as plain values."""
        chosen = "test images: too high" if self.chosen_by == "test_accuracy" else "a held-out fifth of the training"
        known = {"best_cell_chosen_on": chosen}
        if self.probe is not None:
            return {**_asked(self.probe, options).about(), **known}
        about = {"classifier": self.classifier}
        if self.votes:
            vote = "equal votes" if options.uniform else "votes exp(similarity / 0.07)"
            about["knn"] = f"cosine, {vote}"
        return {**about, **known}


# ---- a grid of cells


def paper(cells: Cells, options: Probing) -> Outcome:
    """Judge by logistic regression, nearest neighbours and rank, with one noise for each image."""
    train = cells.train(0)
    linear = logistic_grid(train, cells.labels, cells.test, cells.test_labels, device=cells.device)
    knn = [_nearest(cells, train, options, centred=centred) for centred in (False, True)]
    test = cells.ranked.to("cpu" if cells.device.type == "mps" else cells.device)  # Apple's GPUs lack float64
    ranks = [effective_rank(cell) for cell in test], [effective_rank(cell, "feature", exp=True) for cell in test]
    columns = (linear.held_out, linear.test, linear.every_test.amax(1), linear.l2, *knn, *map(torch.tensor, ranks))
    return Outcome(dict(zip(SCORES, (*columns, mean_share(cells.test)), strict=True)))


def ddae(cells: Cells, options: Probing) -> Outcome:
    """Judge by a linear classifier that sees the training images with new noise in every pass.

    Xiang, Yang, Huang, Wang 2023, "Denoising Diffusion Autoencoders are Unified Self-supervised Learners": every layer
    and noise level, the best on the test images. The random crops and flips of its code are left out, as not every data
    set allows them.
    """
    return Outcome({"test_accuracy": _accuracy(cells, options, DDAE, cells.train)})


def repa(cells: Cells, options: Probing) -> Outcome:
    """Judge by a linear classifier and by CKNNA with a reference, see `cknna`.

    Yu et al. 2025, "Representation Alignment for Generation": linear probes and CKNNA by layer and noise level. The
    classifier sees features of un-augmented images with one noise each, extracted once.
    """
    train = cells.train(0)
    device = "cpu" if cells.device.type == "mps" else cells.device  # Apple's GPUs lack float64
    theirs = Neighbourhood.of(cells.reference.features.to(device))
    ours = (Neighbourhood.of(x[cells.reference.rows].to(device)) for x in cells.test)
    alignment = torch.stack([cknna(x, theirs) for x in ours]).cpu()
    return Outcome({"test_accuracy": _accuracy(cells, options, REPA, lambda _: train), "cknna": alignment})


def _nearest(cells: Cells, train: Tensor, options: Classification | Probing, **vote: float | bool) -> Tensor:
    sides = train, cells.labels, cells.test.to(cells.device), cells.test_labels
    return knn_accuracy(*sides, options.neighbours, uniform=options.uniform, **vote)


def _asked(probe: LinearProbe, options: Classification | Probing) -> LinearProbe:
    return replace(probe, epochs=options.epochs or probe.epochs, seed=options.seed)


def _accuracy(cells: Cells, options: Probing, probe: LinearProbe, train: Callable[[int], Tensor]) -> Tensor:
    *_, models = _asked(probe, options).passes(train, cells.labels, cells.classes, cells.device)
    return accuracies(models, cells.test, cells.test_labels, cells.device)


# ---- a single cell


def in100_linear(cells: Cells, options: Classification) -> Outcome:
    """Judge by the paper's linear probe on ImageNet-100."""
    probe = _asked(IN100, options)
    passes = probe.passes(cells.train, cells.labels, cells.classes, cells.device)
    found = torch.stack([accuracies(models, cells.test, cells.test_labels, cells.device) for models in passes])
    best = found.argmax(dim=0)
    values = {"last": found[-1], "best_on_test": found.amax(dim=0)}
    reported = "last; best_on_test is chosen on test"
    return Outcome(values, {**probe.about(), "best_epoch": int(best[0]) + 1, "reported": reported})


def logistic(cells: Cells, options: Classification) -> Outcome:
    """Judge by logistic regression whose l2 penalty is chosen on a held-out fifth of the training images."""
    sides = cells.train(0), cells.labels, cells.test, cells.test_labels
    scores = logistic_grid(*sides, device=cells.device, iterations=(60, 40))
    values = {"test": scores.test, "held_out": scores.held_out, "best_on_test": scores.every_test.amax(dim=1)}
    classifier = "logistic regression of standardised features, l2 penalty chosen on a held-out fifth of the training"
    return Outcome(values, {"classifier": classifier, "l2_grid": list(L2_GRID), "l2": float(scores.l2[0])})


def knn(cells: Cells, options: Classification) -> Outcome:
    """Judge by k nearest neighbours with cosine similarity (DINO)."""
    accuracy = _nearest(cells, cells.train(0), options, temperature=options.temperature)
    weight = "1" if options.uniform else f"exp(similarity / {options.temperature:g})"
    chosen = {"classifier": "nearest neighbours", "k": options.neighbours, "T": options.temperature}
    return Outcome({"test": accuracy}, {**chosen, "similarity": "cosine", "vote": weight})


def few_shot(cells: Cells, options: Classification, shots: int) -> Outcome:
    """Judge by logistic regression on `shots` training images of each class, several times."""
    train, found = cells.train(0), []
    for draw in range(options.draws):
        part = drawn(cells.labels.cpu(), shots, options.seed, draw).to(train.device)
        found.append(fitted_accuracy(train[:, part], cells.labels[part], cells.test, cells.test_labels, SHOT_L2))
    each = torch.stack(found)
    values = {"mean": each.mean(dim=0), "std": each.std(dim=0, correction=min(1, len(each) - 1))}
    classifier = f"logistic regression of features standardised over the draw, l2 penalty {SHOT_L2:g} of scikit-learn's"
    chosen = {"classifier": classifier, "images_a_class": shots, "draws": options.draws, "seed": options.seed}
    return Outcome(values, {**chosen, "each": each[:, 0].tolist()})


def drawn(labels: Int64[Tensor, " n"], shots: int, seed: int, draw: int) -> Int64[Tensor, " chosen"]:
    """Return the indices of `shots` images of each class, class by class; fewer shots of a draw are part of more."""
    order = torch.randperm(len(labels), generator=generator("few-shot", seed, draw))
    of_class = [order[labels[order] == label][:shots] for label in labels.unique()]
    return torch.cat(of_class)


PROTOCOLS: dict[str, Protocol] = {
    "paper": Protocol(
        paper,
        SCORES,
        "held_out_accuracy",
        votes=True,
        classifier="logistic regression, l2 penalty chosen on a held-out fifth of the training images",
    ),
    "ddae": Protocol(ddae, ("test_accuracy",), probe=DDAE, fresh=True),
    "repa": Protocol(repa, ("test_accuracy", "cknna"), probe=REPA),
    "in100-linear": Protocol(in100_linear, ("last", "best_on_test"), probe=IN100, pool="all"),
    "logistic": Protocol(logistic, ("test", "held_out", "best_on_test"), pool="all"),
    "knn": Protocol(knn, ("test",), votes=True),
    **{f"few-shot-{n}": Protocol(partial(few_shot, shots=n), ("mean", "std"), shots=n) for n in (1, 5, 10)},
}


def find_protocol(name: str, of_grid: bool = True) -> Protocol:
    """Return the protocol called `name`, of a grid of cells or of a single cell.

    Raises:
        UserError: the table has no such protocol, or it is of the other kind.
    """
    offered = [key for key, protocol in PROTOCOLS.items() if protocol.of_grid == of_grid]
    if name not in offered:
        raise UserError(f"--protocol takes {', '.join(offered)}, got {name!r}{did_you_mean(name, offered)}")
    return PROTOCOLS[name]
