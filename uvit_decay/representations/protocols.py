"""Published protocols that evaluate frozen features, by name.

All of them work on features of un-augmented images. A protocol is an entry of PROTOCOLS: a GridProtocol evaluates all
layers at all noise levels (`probe`), a PointProtocol one layer at one noise level (`classify`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from jaxtyping import Int64
from torch import Tensor

from uvit_decay.nn.intermediates import Pool
from uvit_decay.representations import recipes
from uvit_decay.representations.grid import SCORES, TEST
from uvit_decay.representations.linear_probes import DDAE, IN100, REPA, LinearProbe
from uvit_decay.representations.options import NOISE_ALONE, Classification, Probing, ProtocolOptions
from uvit_decay.representations.recipes import Cells, Outcome
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.suggestions import did_you_mean

FEWEST = 5  # training images that any protocol needs: a fifth may be held out
READERS = {  # option -> the fact of the protocols that read it
    "epochs": "probe",
    "neighbours": "votes",
    "uniform": "votes",
    "temperature": "votes",
    "draws": "shots",
}


@dataclass(frozen=True)
class Protocol(ABC):
    """Facts that all protocols state about themselves.

    Args:
        evaluate: function (cells, options) -> outcome that evaluates features.
        scores: names of the scores.
        probe: training of the classifier, if it is trained step by step.
        votes: whether it needs at least as many training images as neighbours.
        shots: number of training images of each class that it needs.
    """

    evaluate: Callable[[Cells, Any], Outcome]
    scores: tuple[str, ...]
    _: KW_ONLY
    probe: LinearProbe | None = None
    votes: bool = False
    shots: int = 0

    @abstractmethod
    def check(self, options: Any, is_encoder: bool | None = None) -> None:
        """Check that the options fit the protocol and the network.

        Args:
            options: options of the protocol.
            is_encoder: whether the network is an encoder; None if the network is not open yet.

        Raises:
            UserError: an option has no effect, or needs the noise of a denoiser.
        """

    def _check_read(self, options: ProtocolOptions, names: Sequence[str], chosen: Sequence[str]) -> None:
        """Raise a UserError if one of the options is set but read by none of the chosen protocols.

        Args:
            options: the options.
            names: names of the options to check, of READERS.
            chosen: names of the protocols.
        """
        offered = _select(type(self))
        for name in names:
            readers = [key for key, protocol in offered.items() if getattr(protocol, READERS[name])]
            if getattr(options, name) != getattr(type(options), name) and not set(readers) & set(chosen):
                raise UserError(
                    f"{_flag(name)}: --protocol {','.join(chosen)} does not read it; leave it out, or choose "
                    f"{' or '.join(readers)}"
                )

    def check_images(self, labels: Int64[Tensor, " n"], names: Sequence[str], options: ProtocolOptions) -> None:
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


@dataclass(frozen=True, kw_only=True)
class GridProtocol(Protocol):
    """A protocol of `probe`, which evaluates all layers at all noise levels; see also the arguments of `Protocol`.

    Args:
        chosen_by: the score by which the best grid point is chosen. With `test_accuracy` the best accuracy is biased
            upwards.
        fresh: whether every pass over the training images has its own noise.
        needs_reference: whether it compares with the features of a reference network.
        classifier: the classifier in words, for reports, if there is no `probe`, which describes itself.

    Raises:
        UserError: it lacks the score `test_accuracy` or `chosen_by`.
    """

    chosen_by: Literal["held_out_accuracy", "test_accuracy"] = "test_accuracy"
    fresh: bool = False
    needs_reference: bool = False
    classifier: str = ""

    def __post_init__(self) -> None:
        for name in (TEST, self.chosen_by):
            if name not in self.scores:
                raise UserError(f"a GridProtocol needs the score {name}, got {', '.join(self.scores)}; add it")

    def check(self, options: Probing, is_encoder: bool | None = None) -> None:
        self._check_read(options, ("epochs", "neighbours", "uniform"), [options.protocol])
        if not is_encoder:
            return
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

    def check(self, options: Classification, is_encoder: bool | None = None) -> None:
        self._check_read(options, tuple(READERS), options.protocol)
        if is_encoder and options.time is not None:
            raise UserError("--time: this network is an encoder and sees clean images; leave it out")


PROTOCOLS: dict[str, Protocol] = {
    "paper": GridProtocol(
        recipes.paper,
        SCORES,
        chosen_by="held_out_accuracy",
        votes=True,
        classifier="logistic regression, l2 penalty chosen on a held-out fifth of the training images",
    ),
    "ddae": GridProtocol(recipes.ddae, (TEST,), probe=DDAE, fresh=True),
    "repa": GridProtocol(recipes.repa, (TEST, "cknna"), probe=REPA, needs_reference=True),
    "in100-linear": PointProtocol(recipes.in100_linear, ("last", "best_on_test"), probe=IN100, pool="all"),
    "logistic": PointProtocol(recipes.logistic, ("test", "held_out", "best_on_test"), pool="all"),
    "knn": PointProtocol(recipes.knn, ("test",), votes=True),
    "few-shot-1": PointProtocol(partial(recipes.few_shot, shots=1), ("mean", "std"), shots=1),
    "few-shot-5": PointProtocol(partial(recipes.few_shot, shots=5), ("mean", "std"), shots=5),
    "few-shot-10": PointProtocol(partial(recipes.few_shot, shots=10), ("mean", "std"), shots=10),
}
Kind = TypeVar("Kind", bound=Protocol)


def find_protocol(name: str, kind: type[Kind]) -> Kind:
    """Return the protocol called `name`, a GridProtocol or a PointProtocol.

    Raises:
        UserError: the table has no such protocol, or it is of the other kind.
    """
    offered = _select(kind)
    if name not in offered:
        known = [*offered, NOISE_ALONE] if kind is GridProtocol else [*offered]
        raise UserError(f"--protocol takes {', '.join(known)}, got {name!r}{did_you_mean(name, known)}")
    return offered[name]


def _select(kind: type[Kind]) -> dict[str, Kind]:
    """Return the protocols of a kind by name, in the order of the table."""
    return {name: protocol for name, protocol in PROTOCOLS.items() if isinstance(protocol, kind)}


def _flag(name: str) -> str:
    """Return the flag of an option."""
    return "--knn-uniform" if name == "uniform" else f"--{name.replace('_', '-')}"
