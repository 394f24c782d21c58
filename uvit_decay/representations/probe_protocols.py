"""Published protocols that evaluate frozen features: the functions, and the table that names them.

All of them work on features of un-augmented images. A protocol is an entry of PROTOCOLS: a GridProtocol evaluates all
layers at all noise levels (`probe`), a PointProtocol one layer at one noise level (`classify`). Each entry has a
function (cells, options) -> outcome of the features of some layers at one noise level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.nn.intermediates import Pool
from uvit_decay.representations.grid import SCORES, TEST
from uvit_decay.representations.knn import knn_accuracy
from uvit_decay.representations.linear_probes import DDAE, IN100, REPA, LinearProbe, accuracies
from uvit_decay.representations.logistic import L2_GRID, fit_accuracy, logistic_grid
from uvit_decay.representations.probe_options import NOISE_ALONE, Classification, Probing
from uvit_decay.representations.rank import effective_rank_exp, mean_share, spectrum_entropy
from uvit_decay.representations.reference import Neighbourhood, ReferenceFeatures, cknna
from uvit_decay.runtime.random import generator
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.suggestions import did_you_mean

SHOT_L2 = 1.0  # penalty of few-shot classifiers, in units of scikit-learn's 1 / C; also scikit-learn's default


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
    reference: ReferenceFeatures | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a recipe.

    Args:
        values: scores of the layers by name, float64 (layers,).
        chosen: for a PointProtocol, the settings that its scores depend on, as plain values.
    """

    values: Mapping[str, Float[Tensor, " layers"]]
    chosen: Mapping[str, Any] = field(default_factory=dict)


# ---- of all layers and noise levels


def paper(cells: Cells, options: Probing) -> Outcome:
    """Evaluate by logistic regression, nearest neighbours and rank, with one noise per image."""
    train = cells.train(0)
    linear = logistic_grid(train, cells.labels, cells.test, cells.test_labels, device=cells.device)
    votes = _prepare_votes(cells, train, options)
    ranked = cells.ranked.to(_choose_float64_device(cells.device))
    values = {
        "held_out_accuracy": linear.held_out,
        "test_accuracy": linear.test,
        "best_on_test_accuracy": linear.every_test.amax(1),
        "l2": linear.l2,
        "knn_accuracy": knn_accuracy(**votes),
        "knn_centred_accuracy": knn_accuracy(**votes, centred=True),
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


def _prepare_votes(
    cells: Cells, train: Float[Tensor, "layers n d"], options: Classification | Probing, temperature: float = 0.07
) -> dict[str, Any]:
    """Return the arguments of `knn_accuracy`, with the test features on `cells.device`."""
    return {
        "train": train,
        "train_labels": cells.labels,
        "test": cells.test.to(cells.device),
        "test_labels": cells.test_labels,
        "k": options.neighbours,
        "temperature": temperature,
        "uniform": options.uniform,
    }


def _train_accuracy(
    cells: Cells, options: Probing, probe: LinearProbe, train: Callable[[int], Tensor]
) -> Float[Tensor, " layers"]:
    """Train the classifiers and return their accuracies on the test images; `train` is as in `Cells`."""
    *_, models = probe.configure(options.epochs, options.seed).passes(train, cells.labels, cells.classes, cells.device)
    return accuracies(models, cells.test, cells.test_labels, cells.device)


# ---- of one layer and noise level


def in100_linear(cells: Cells, options: Classification) -> Outcome:
    """Evaluate by the paper's linear probe on ImageNet-100."""
    probe = IN100.configure(options.epochs, options.seed)
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
    accuracy = knn_accuracy(**_prepare_votes(cells, cells.train(0), options, options.temperature))
    chosen = {
        "classifier": "nearest neighbours",
        "k": options.neighbours,
        "T": options.temperature,
        "similarity": "cosine",
        "vote": "1" if options.uniform else f"exp(similarity / {options.temperature:g})",
    }
    return Outcome({"test": accuracy}, chosen)


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


# ---- the table


@dataclass(frozen=True)
class Protocol:
    """Facts that all protocols state about themselves.

    Args:
        evaluate: function (cells, options) -> outcome that evaluates features.
        scores: names of the scores.
        shots: number of training images of each class that it needs.
    """

    evaluate: Callable[[Cells, Any], Outcome]
    scores: tuple[str, ...]
    _: KW_ONLY
    shots: int = 0


@dataclass(frozen=True, kw_only=True)
class GridProtocol(Protocol):
    """A protocol of `probe`, which evaluates all layers at all noise levels; see also the arguments of `Protocol`.

    Args:
        chosen_by: the score by which the best grid point is chosen. With `test_accuracy` the best accuracy is biased
            upwards.
        fresh: whether every pass over the training images has its own noise.
        needs_reference: whether it compares with the features of a reference network.
        probe: training of the classifier, if it is trained step by step.
        votes: whether there are scores of nearest neighbours.
        classifier: the classifier in words, for reports, if there is no `probe`, which describes itself.
    """

    chosen_by: Literal["held_out_accuracy", "test_accuracy"] = "test_accuracy"
    fresh: bool = False
    needs_reference: bool = False
    probe: LinearProbe | None = None
    votes: bool = False
    classifier: str = ""

    def check_encoder(self, options: Probing) -> None:
        """Raise a UserError if noise is asked for, which an encoder does not see."""
        noisy = {
            "times": options.times is not None,
            "draws": options.draws > 1,
            "noise draws": options.noise_draws is not None,
            f"protocol {options.protocol}": self.fresh,
        }
        asked = [name for name, is_asked in noisy.items() if is_asked]
        if asked:
            raise UserError(f"this network is an encoder and sees images without noise: leave out {', '.join(asked)}")

    def about(self, options: Probing) -> dict[str, Any]:
        """Return the settings for reports, as plain values."""
        if self.probe is not None:
            about = self.probe.configure(options.epochs, options.seed).about()
        else:
            about = {"classifier": self.classifier}
            if self.votes:
                vote = "equal votes" if options.uniform else "votes exp(similarity / 0.07)"
                about["knn"] = f"cosine, {vote}"
        if self.chosen_by == TEST:
            about["best_cell_chosen_on"] = "test images (optimistically biased)"
        else:
            about["best_cell_chosen_on"] = "a held-out fifth of the training"
        return about


@dataclass(frozen=True, kw_only=True)
class PointProtocol(Protocol):
    """A protocol of `classify`, which evaluates one layer at one noise level; see also the arguments of `Protocol`.

    Args:
        pool: default way to pool the tokens.
    """

    pool: Pool = "mean"


PROTOCOLS: dict[str, Protocol] = {
    "paper": GridProtocol(
        paper,
        SCORES,
        chosen_by="held_out_accuracy",
        votes=True,
        classifier="logistic regression, l2 penalty chosen on a held-out fifth of the training images",
    ),
    "ddae": GridProtocol(ddae, (TEST,), probe=DDAE, fresh=True),
    "repa": GridProtocol(repa, (TEST, "cknna"), probe=REPA, needs_reference=True),
    "in100-linear": PointProtocol(in100_linear, ("last", "best_on_test"), pool="all"),
    "logistic": PointProtocol(logistic, ("test", "held_out", "best_on_test"), pool="all"),
    "knn": PointProtocol(knn, ("test",)),
    "few-shot-1": PointProtocol(partial(few_shot, shots=1), ("mean", "std"), shots=1),
    "few-shot-5": PointProtocol(partial(few_shot, shots=5), ("mean", "std"), shots=5),
    "few-shot-10": PointProtocol(partial(few_shot, shots=10), ("mean", "std"), shots=10),
}
Kind = TypeVar("Kind", bound=Protocol)


def find_protocol(name: str, kind: type[Kind]) -> Kind:
    """Return the protocol called `name`, a GridProtocol or a PointProtocol."""
    offered = {key: protocol for key, protocol in PROTOCOLS.items() if isinstance(protocol, kind)}
    if name not in offered:
        known = [*offered, NOISE_ALONE] if kind is GridProtocol else [*offered]
        hint = did_you_mean(name, known)
        raise UserError(f"choose one of {', '.join(known)}, got {name!r}{hint}", argument="protocol")
    return offered[name]
