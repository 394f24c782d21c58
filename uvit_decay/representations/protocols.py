"""Published protocols that evaluate frozen features, by name.

All of them work on features of un-augmented images. A protocol is an entry of PROTOCOLS. Protocols of `probe` evaluate
a grid of cells (layer, noise level), protocols of `classify` a single cell.
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
from uvit_decay.representations.knn import PCS, WithoutPCs, knn_accuracy, knn_without_pcs
from uvit_decay.representations.linear_probes import DDAE, IN100, REPA, LinearProbe, accuracies
from uvit_decay.representations.logistic import L2_GRID, fit_accuracy, logistic_grid
from uvit_decay.representations.options import NOISE_SHARE, Classification, Probing
from uvit_decay.representations.rank import effective_rank_exp, mean_share, spectrum_entropy
from uvit_decay.representations.reference import Neighbourhood, Reference, cknna
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.random import generator
from uvit_decay.runtime.suggestions import did_you_mean

SHOT_L2 = 1.0  # penalty of few-shot classifiers, in units of scikit-learn's 1 / C; also scikit-learn's default
FEWEST = 5  # training images that any protocol needs: a fifth may be held out


@dataclass(frozen=True)
class Cells:
    """Features of some layers at one noise level under one draw of the noise, float32 (layers, n, d), on any device.

    Args:
        train: function (number of the pass) -> features of the training images. Every pass has its own noise. Protocols
            with a single noise per image use pass 0. Each call runs the network, unless the images are clean.
        labels: classes of the training images, 0 to `classes` - 1.
        test: features of the test images.
        test_labels: classes of the test images.
        classes: number of classes.
        device: device that computes.
        ranked: features of the test images for the ranks: their class tokens, or `test`.
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
    """Result of a protocol.

    Args:
        values: scores of the layers by name, float64 (layers,).
        chosen: for a single cell, the settings that its scores depend on, as plain values.
    """

    values: Mapping[str, Float[Tensor, " layers"]]
    chosen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    Args:
        judge: function (cells, options) -> outcome that evaluates features; None if there is no classifier.
        scores: names of the scores. Protocols of a grid have `test_accuracy` among them or no classifier, protocols of
            a single cell have neither.
        chosen_by: the score by which the best cell of a grid is chosen. With `test_accuracy` the best accuracy is
            biased upwards.
        probe: training of the classifier, if it is trained step by step.
        fresh: whether every pass over the training images has its own noise.
        pool: default way to pool the tokens.
        votes: whether it needs at least as many training images as neighbours.
        shots: number of training images of each class that it needs.
        classifier: the classifier of a grid in words, for reports, if there is no `probe`, which describes itself.

    Raises:
        UserError: the protocol of a grid chooses the best cell by a score that it does not have.
    """

    judge: Callable[[Cells, Any], Outcome] | None
    scores: tuple[str, ...]
    chosen_by: Literal["held_out_accuracy", "test_accuracy"] = "test_accuracy"
    probe: LinearProbe | None = None
    fresh: bool = False
    pool: Pool = "mean"
    votes: bool = False
    shots: int = 0
    classifier: str = ""

    def __post_init__(self) -> None:
        if self.of_grid and self.classifies and self.chosen_by not in self.scores:
            known = ", ".join(self.scores)
            raise UserError(f"chosen_by {self.chosen_by}: the protocol has no such score; choose one of {known}")

    def check(self, labels: Int64[Tensor, " n"], names: Sequence[str], options: Classification | Probing) -> None:
        """Check that there are enough training images.

        Args:
            labels: classes of the training images.
            names: names of all classes.
            options: options of the protocol.

        Raises:
            UserError: there are fewer images than FEWEST, neighbours, or shots in a class.
        """
        least = FEWEST
        if self.votes:
            least = max(FEWEST, options.neighbours)
        if len(labels) < least:
            reason = "a fifth is held out" if least == FEWEST else "the number of neighbours"
            raise UserError(f"{least} training images or more are needed ({reason}), got {len(labels)}")
        counts = labels.bincount(minlength=len(names)).tolist()
        for count, name in zip(counts, names, strict=True):
            if count < self.shots:
                raise UserError(f"{self.shots} training images of each class are needed, {name} has {count}")

    @property
    def of_grid(self) -> bool:
        """True if it evaluates a grid of cells, as `evaluate.py probe` does."""
        return "test_accuracy" in self.scores or not self.classifies

    @property
    def classifies(self) -> bool:
        """True if it has a classifier, unlike the protocol of the noise share alone."""
        return self.judge is not None

    @property
    def aligned(self) -> bool:
        """True if it needs a reference."""
        return "cknna" in self.scores

    def about(self, options: Probing) -> dict[str, Any]:
        """Return the settings of a grid for reports, as plain values; nothing without a classifier."""
        if not self.classifies:
            return {}
        if self.probe is not None:
            about = _set_options(self.probe, options).about()
        else:
            about = {"classifier": self.classifier}
            if self.votes:
                vote = "equal votes" if options.uniform else "votes exp(similarity / 0.07)"
                about["knn"] = f"cosine, {vote}"
        if self.chosen_by == "test_accuracy":
            about["best_cell_chosen_on"] = "test images (optimistically biased)"
        else:
            about["best_cell_chosen_on"] = "a held-out fifth of the training"
        return about


# ---- a grid of cells


def paper(cells: Cells, options: Probing) -> Outcome:
    """Evaluate by logistic regression, nearest neighbours and rank, with one noise per image."""
    train = cells.train(0)
    linear = logistic_grid(train, cells.labels, cells.test, cells.test_labels, device=cells.device)
    without = _knn_without_pcs(cells, train, options)
    ranked = cells.ranked.to(_choose_float64_device(cells.device))
    values = {
        "held_out_accuracy": linear.held_out,
        "test_accuracy": linear.test,
        "best_on_test_accuracy": linear.every_test.amax(1),
        "l2": linear.l2,
        "knn_accuracy": _knn_accuracy(cells, train, options),
        "knn_centred_accuracy": _knn_accuracy(cells, train, options, centred=True),
        "knn_without_pcs_accuracy": without.accuracy,
        "pcs_removed": without.removed,
        "spectrum_entropy": torch.tensor([spectrum_entropy(cell) for cell in ranked]),
        "effective_rank_exp": torch.tensor([effective_rank_exp(cell) for cell in ranked]),
        "mean_share": mean_share(cells.test),
    }
    return Outcome(values)


def ddae(cells: Cells, options: Probing) -> Outcome:
    """Evaluate by a linear classifier that sees the training images with new noise in every pass.

    Xiang, Yang, Huang, Wang 2023, "Denoising Diffusion Autoencoders are Unified Self-supervised Learners": every layer
    and noise level, the best on the test images. The random crops and flips of its code are left out, because not every
    data set allows them.
    """
    return Outcome({"test_accuracy": _train_accuracy(cells, options, DDAE, cells.train)})


def repa(cells: Cells, options: Probing) -> Outcome:
    """Evaluate by a linear classifier and by CKNNA with a reference, see `cknna`.

    Yu et al. 2025, "Representation Alignment for Generation": linear probes and CKNNA by layer and noise level. The
    classifier sees features of un-augmented images with one noise each, extracted once.
    """
    train = cells.train(0)
    device = _choose_float64_device(cells.device)
    reference = Neighbourhood.of(cells.reference.features.to(device))
    alignments = []
    for features in cells.test:
        neighbourhood = Neighbourhood.of(features[cells.reference.rows].to(device))
        alignments.append(cknna(neighbourhood, reference))
    alignment = torch.stack(alignments).cpu()
    accuracy = _train_accuracy(cells, options, REPA, lambda _: train)
    return Outcome({"test_accuracy": accuracy, "cknna": alignment})


def _choose_float64_device(device: torch.device) -> torch.device:
    """Return the device that computes in float64: `device`, or the CPU for Apple's GPUs, which lack float64."""
    return torch.device("cpu") if device.type == "mps" else device


def _knn_accuracy(
    cells: Cells, train: Tensor, options: Classification | Probing, temperature: float = 0.07, centred: bool = False
) -> Float[Tensor, " layers"]:
    """Return the accuracy of nearest neighbours on the test images, computed on `cells.device`."""
    return knn_accuracy(
        train,
        cells.labels,
        cells.test.to(cells.device),
        cells.test_labels,
        k=options.neighbours,
        temperature=temperature,
        uniform=options.uniform,
        centred=centred,
    )


def _knn_without_pcs(
    cells: Cells, train: Tensor, options: Classification | Probing, temperature: float = 0.07
) -> WithoutPCs:
    """Return the accuracy of nearest neighbours without the first principal components, computed on `cells.device`."""
    return knn_without_pcs(
        train,
        cells.labels,
        cells.test.to(cells.device),
        cells.test_labels,
        k=options.neighbours,
        temperature=temperature,
        uniform=options.uniform,
        candidates=[number for number in PCS if number < train.shape[-1]],
    )


def _set_options(probe: LinearProbe, options: Classification | Probing) -> LinearProbe:
    """Return the probe with the seed, and the epochs if any, of the options."""
    return replace(probe, epochs=options.epochs or probe.epochs, seed=options.seed)


def _train_accuracy(
    cells: Cells, options: Probing, probe: LinearProbe, train: Callable[[int], Tensor]
) -> Float[Tensor, " layers"]:
    """Train the classifiers and return their accuracies on the test images; `train` is as in `Cells`."""
    *_, models = _set_options(probe, options).passes(train, cells.labels, cells.classes, cells.device)
    return accuracies(models, cells.test, cells.test_labels, cells.device)


# ---- a single cell


def in100_linear(cells: Cells, options: Classification) -> Outcome:
    """Evaluate by the paper's linear probe on ImageNet-100."""
    probe = _set_options(IN100, options)
    by_epoch = []
    for models in probe.passes(cells.train, cells.labels, cells.classes, cells.device):
        by_epoch.append(accuracies(models, cells.test, cells.test_labels, cells.device))
    accuracy = torch.stack(by_epoch)  # (epochs, layers)
    best = accuracy.argmax(dim=0)
    values = {"last": accuracy[-1], "best_on_test": accuracy.amax(dim=0)}
    chosen = probe.about()
    chosen["best_epoch"] = int(best[0]) + 1
    chosen["reported"] = "last; best_on_test is chosen on test"
    return Outcome(values, chosen)


def logistic(cells: Cells, options: Classification) -> Outcome:
    """Evaluate by logistic regression with an l2 penalty chosen on a held-out fifth of the training images."""
    scores = logistic_grid(
        cells.train(0),
        cells.labels,
        cells.test,
        cells.test_labels,
        device=cells.device,
        iterations=(60, 40),
    )
    values = {"test": scores.test, "held_out": scores.held_out, "best_on_test": scores.every_test.amax(dim=1)}
    chosen = {
        "classifier": "logistic regression of standardised features, l2 penalty chosen on a held-out fifth of the "
        "training",
        "l2_grid": list(L2_GRID),
        "l2": float(scores.l2[0]),
    }
    return Outcome(values, chosen)


def knn(cells: Cells, options: Classification) -> Outcome:
    """Evaluate by k nearest neighbours with cosine similarity (DINO)."""
    accuracy = _knn_accuracy(cells, cells.train(0), options, temperature=options.temperature)
    return Outcome({"test": accuracy}, _describe_knn(options))


def knn_without_components(cells: Cells, options: Classification) -> Outcome:
    """Evaluate as `knn` does, around the mean and without the first principal components, see `knn_without_pcs`."""
    without = _knn_without_pcs(cells, cells.train(0), options, temperature=options.temperature)
    chosen = _describe_knn(options) | {
        "similarity": "cosine around the mean of the training, without its first principal components",
        "pcs_removed": int(without.removed[0]),
        "candidates": list(PCS),
        "chosen_on": "a held-out fifth of the training",
    }
    return Outcome({"test": without.accuracy}, chosen)


def _describe_knn(options: Classification) -> dict[str, Any]:
    """Return the settings of nearest neighbours for reports, as plain values."""
    return {
        "classifier": "nearest neighbours",
        "k": options.neighbours,
        "T": options.temperature,
        "similarity": "cosine",
        "vote": "1" if options.uniform else f"exp(similarity / {options.temperature:g})",
    }


def few_shot(cells: Cells, options: Classification, shots: int) -> Outcome:
    """Evaluate by logistic regression on `shots` training images of each class, `options.draws` times."""
    train = cells.train(0)
    by_draw = []
    for draw in range(options.draws):
        part = draw_shots(cells.labels.cpu(), shots, options.seed, draw).to(train.device)
        labels = cells.labels[part]
        by_draw.append(fit_accuracy(train[:, part], labels, cells.test, cells.test_labels, SHOT_L2))
    each = torch.stack(by_draw)  # (draws, layers)
    correction = min(1, len(each) - 1)  # a single draw has the standard deviation 0
    values = {"mean": each.mean(dim=0), "std": each.std(dim=0, correction=correction)}
    chosen = {
        "classifier": f"logistic regression of features standardised over the draw, l2 penalty {SHOT_L2:g} of "
        "scikit-learn's",
        "images_a_class": shots,
        "draws": options.draws,
        "seed": options.seed,
        "each": each[:, 0].tolist(),
    }
    return Outcome(values, chosen)


def draw_shots(labels: Int64[Tensor, " n"], shots: int, seed: int, draw: int) -> Int64[Tensor, " chosen"]:
    """Return the indices of `shots` images of each class, class by class.

    With fewer shots, the same draw chooses a subset of these images.
    """
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
    NOISE_SHARE: Protocol(None, ()),
    "in100-linear": Protocol(in100_linear, ("last", "best_on_test"), probe=IN100, pool="all"),
    "logistic": Protocol(logistic, ("test", "held_out", "best_on_test"), pool="all"),
    "knn": Protocol(knn, ("test",), votes=True),
    "knn-without-pcs": Protocol(knn_without_components, ("test",), votes=True),
    "few-shot-1": Protocol(partial(few_shot, shots=1), ("mean", "std"), shots=1),
    "few-shot-5": Protocol(partial(few_shot, shots=5), ("mean", "std"), shots=5),
    "few-shot-10": Protocol(partial(few_shot, shots=10), ("mean", "std"), shots=10),
}


def find_protocol(name: str, of_grid: bool = True) -> Protocol:
    """Return the protocol called `name`, of a grid of cells or of a single cell.

    Raises:
        UserError: the table has no such protocol, or it is of the other kind.
    """
    offered = [key for key, protocol in PROTOCOLS.items() if protocol.of_grid == of_grid]
    if name not in offered:
        hint = did_you_mean(name, offered)
        raise UserError(f"--protocol takes {', '.join(offered)}, got {name!r}{hint}")
    return PROTOCOLS[name]
