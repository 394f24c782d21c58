"""Published protocols that judge the features of every layer at every noise level, by name.

A protocol judges the layers of one noise level under one draw of the noise; `probing` repeats it for the levels and
draws, and averages over the draws. A protocol is added by an entry in PROBE_PROTOCOLS and its name in
`options.ProbeProtocolName`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.representations.alignment import Neighbourhood, cknna
from uvit_decay.representations.effective_rank import effective_rank
from uvit_decay.representations.grid import SCORES
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.linear_probes import DDAE, REPA, LinearProbe, accuracies
from uvit_decay.representations.logistic import logistic_grid
from uvit_decay.representations.options import ProbeProtocolName, Probing
from uvit_decay.representations.reference import Reference

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
    columns = (linear.held_out, linear.test, linear.every_test.amax(1), linear.l2, knn, *_ranks(cells))
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
