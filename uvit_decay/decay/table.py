"""The table of shortcuts: how each kind weights the identity and the branch, x <- alpha x + beta f(scale norm(x)).

A kind is one function and one entry of `SHORTCUTS`, which the command line, the networks, `attach`, the tests and
docs/shortcuts.md read. Notation: k = 0..N-1 counts residual branches in execution order, u_k in [0, 1] is the depth of
a branch (0 where `branches` leaves it out), a is `alpha_min`, P_k = alpha_0 ... alpha_{k-1} is the weight of the input
in the input of branch k, and l = 1..L counts transformer blocks of two branches each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from uvit_decay.terminal.errors import UserError, check_numbers
from uvit_decay.terminal.typed import check_types

SQRT_HALF = math.sqrt(0.5)
MP_SUM = 0.3  # EDM2's t, the share of the branch
NAMES = ("alphas", "betas", "scales")


class Weights(NamedTuple):
    """Numbers of one branch; a learned one is a tensor, and a learned beta may have one value per channel."""

    alpha: float | Tensor
    beta: float | Tensor
    scale: float | Tensor


@dataclass(frozen=True)
class DepthAttention:
    """A kind of attention over depth, which replaces the shortcuts: see `uvit_decay.nn.depth_attention`.

    Args:
        formula: the input of a branch.
        source: paper.
        group: number S of branches in a group.
        sums: whether a group is read as the sum of its outputs. Otherwise a finished group is read as its last output.
        scaled: whether logits are divided by sqrt(d).
        time: whether queries depend on the time of a denoiser.
        plain_start: see `Kind`.
    """

    formula: str
    source: str
    group: int = 1
    sums: bool = True
    scaled: bool = False
    time: bool = False
    plain_start: bool = False


@dataclass(frozen=True)
class Shortcuts:
    """Weights of all branches: x <- alphas[k] x + betas[k] f_k(scales[k] norm(x)), k in execution order.

    Args:
        alphas: weights of the identity.
        betas: weights of the branches.
        scales: factors of the norms' outputs.
        learned: the weights that are parameters; the numbers here are their initial values.
        per_channel: whether there is a beta for each channel.
        depth: attention over depth instead of shortcuts; alphas and betas are then 1.
    """

    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    scales: tuple[float, ...]
    learned: Literal["alphas", "betas", "queries"] | None = None
    per_channel: bool = False
    depth: DepthAttention | None = None

    @property
    def recorded(self) -> tuple[str, ...]:
        """The names of the weights in a state_dict: alphas, learned weights, and weights that are not all 1."""
        names = []
        for name in NAMES:
            if name in ("alphas", self.learned) or set(getattr(self, name)) != {1.0}:
                names.append(name)
        return tuple(names)

    @property
    def gains(self) -> tuple[float, ...]:
        """The gains beta_k / P_{k+1} of the branches in an equivalent network with plain shortcuts; not of ResNets.

        Raises:
            UserError: alphas or betas are not positive, so that no such network exists, or gains exceed float32.
        """
        if min(*self.alphas, *self.betas) <= 0:
            raise UserError(
                "the gains beta / P of branches (gain, rate_over_gain) need alphas and betas above 0; "
                "choose a schedule with positive weights"
            )
        gains = []
        product = 1.0
        for alpha, beta in zip(self.alphas, self.betas, strict=True):
            product *= alpha
            gains.append(beta / product if product > 0 else math.inf)
        if max(gains) > torch.finfo(torch.float32).max:
            raise UserError(
                f"the gains beta / P of {len(gains)} branches (gain, rate_over_gain) exceed float32; "
                "set alpha_min closer to 1"
            )
        return tuple(gains)

    def tensor(self, name: str, dim: int) -> Tensor:
        """Return the weights called `name`, float32 (branches,), or (branches, dim) if learned for each channel."""
        values = torch.tensor(getattr(self, name))
        if self.per_channel and name == self.learned:
            return values[:, None].repeat(1, dim)
        return values

    def plain(self, first: int = 0, last: int | None = None) -> bool:
        """Return whether branches `first` to `last` (exclusive) are ordinary ones, x + f(norm(x))."""
        values = (*self.alphas[first:last], *self.betas[first:last], *self.scales[first:last])
        return self.learned is None and set(values) == {1.0}


@dataclass(frozen=True)
class Kind:
    """A kind of shortcut.

    Args:
        formula: the numbers of a branch, and its equation if it is not x <- alpha x + f(norm(x)).
        source: paper or page.
        weights: function (depths u_k of the branches, alpha_min) -> shortcuts.
        falls: whether the weights depend on alpha_min, granularity, index and branches. If not, alpha_min and branches
            must keep their defaults; granularity and index are ignored.
        gains: whether the shortcuts are plain, with the `gains` of these weights as betas: the same function.
        blocks: whether it needs blocks of two branches, channels of one width, or layers that read the stream through
            norms, so that it does not fit a ResNet.
        plain_start: whether the network equals the plain network at the start of training, with the same weights, if
            all branches start at 0 (`zero_init`, SiT).
    """

    formula: str
    source: str
    weights: Callable[[Sequence[float], float], Shortcuts]
    falls: bool = False
    gains: bool = False
    blocks: bool = False
    plain_start: bool = False


def check_finite(**weights: Sequence[float]) -> None:
    """Raise a UserError that names the first of `weights` with an item that is not a finite number."""
    for name, numbers in weights.items():
        for number in numbers:
            check_numbers("(-inf, inf)", **{name: number})


@check_types
def weighted(
    alphas: Sequence[float],
    betas: Sequence[float] | float = 1.0,
    scales: Sequence[float] | float = 1.0,
    learned: Literal["alphas", "betas"] | None = None,
    per_channel: bool = False,
) -> Shortcuts:
    """Return shortcuts with these weights; betas and scales may be one number for all branches."""
    if not isinstance(betas, Sequence):
        betas = [betas] * len(alphas)
    if not isinstance(scales, Sequence):
        scales = [scales] * len(alphas)
    check_finite(alphas=alphas, betas=betas, scales=scales)
    return Shortcuts(tuple(alphas), tuple(betas), tuple(scales), learned, per_channel)


def _linear(depths: Sequence[float], a: float) -> list[float]:
    return [1.0 - (1.0 - a) * u for u in depths]


def _cosine(depths: Sequence[float], a: float) -> list[float]:
    return [a + (1.0 - a) * 0.5 * (1.0 + math.cos(math.pi * u)) for u in depths]


def _mp_sum(depths: Sequence[float], a: float) -> Shortcuts:
    norm = math.hypot(1.0 - MP_SUM, MP_SUM)
    return weighted([(1.0 - MP_SUM) / norm] * len(depths), MP_SUM / norm)


def _depth_scaled(depths: Sequence[float], a: float) -> Shortcuts:
    scales = [1.0 / math.sqrt(k // 2 + 1) for k in range(len(depths))]
    return weighted([1.0] * len(depths), scales=scales)


def _layerscale(depths: Sequence[float], a: float) -> Shortcuts:
    blocks = len(depths) // 2
    initial = 1e-6
    if blocks <= 18:
        initial = 1e-1
    elif blocks <= 24:
        initial = 1e-5
    return weighted([1.0] * len(depths), initial, learned="betas", per_channel=True)


PAPER = "Residual Connections Harm Generative Representation Learning, "
SHORTCUTS: dict[str, Kind] = {
    "linear": Kind(
        "alpha_k = 1 - (1 - a) u_k",
        PAPER + "Eq. 5",
        lambda depths, a: weighted(_linear(depths, a)),
        falls=True,
    ),
    "cosine": Kind(
        "alpha_k = a + (1 - a) (1 + cos(pi u_k)) / 2",
        PAPER + "Table 3a, which gives no formula",
        lambda depths, a: weighted(_cosine(depths, a)),
        falls=True,
    ),
    "learnable": Kind(
        "alpha_k learned, starting from linear",
        PAPER + "Table 5, which gives no initial values",
        lambda depths, a: weighted(_linear(depths, a), learned="alphas"),
        falls=True,
    ),
    "constant": Kind(
        "sqrt(1/2) (x + f)",
        PAPER + "Table 3b",
        lambda depths, a: weighted([SQRT_HALF] * len(depths), SQRT_HALF),
    ),
    "constant-branch": Kind(
        "x + sqrt(1/2) f",
        PAPER + "Table 3b",
        lambda depths, a: weighted([1.0] * len(depths), SQRT_HALF),
        plain_start=True,
    ),
    "gain": Kind(
        "x + f / P_{k+1}, with the P of linear: for the same initial weights, the same function as linear, up to the "
        "norms' eps",
        "the control of docs/equivalence.md",
        lambda depths, a: weighted(_linear(depths, a)),
        falls=True,
        gains=True,
        blocks=True,
        plain_start=True,
    ),
    "mp_sum": Kind(
        "((1 - t) x + t f) / sqrt((1 - t)^2 + t^2), t = 0.3",
        "EDM2 (Karras et al., CVPR 2024), Eq. 88",
        _mp_sum,
    ),
    "depth_scaled": Kind(
        "x + f(norm(x) / sqrt(l))",
        "The Curse of Depth (Sun et al., 2025)",
        _depth_scaled,
        blocks=True,
        plain_start=True,
    ),
    "layerscale": Kind(
        "x + beta_k f, beta_k learned for each channel, from 0.1 (up to 18 blocks), 1e-5 (24), 1e-6 (more)",
        "CaiT (Touvron et al., ICCV 2021)",
        _layerscale,
        blocks=True,
        plain_start=True,
    ),
    "rezero": Kind(
        "x + beta_k f, beta_k learned, from 0; f is not zero-initialised",
        "ReZero (Bachlechner et al., UAI 2021)",
        lambda depths, a: weighted([1.0] * len(depths), 0.0, learned="betas"),
        plain_start=True,
    ),
}

ATTNRES = "AttnRes (Kimi Team, arXiv 2603.15031)"
DAR = "Diffusion-Adaptive Routing (arXiv 2605.20708), "
DEPTH_ATTENTION: dict[str, DepthAttention] = {
    "attnres": DepthAttention(
        "softmax-weighted mean of all earlier outputs, by a learned query for each branch", ATTNRES
    ),
    "attnres-2": DepthAttention("attnres over sums of groups of 2 branches", ATTNRES, group=2),
    "attnres-4": DepthAttention("attnres over sums of groups of 4 branches", ATTNRES, group=4),
    "attnres-8": DepthAttention("attnres over sums of groups of 8 branches", ATTNRES, group=8),
    "dar": DepthAttention(
        "as attnres, with logits / sqrt(d), over the last output of each finished group of 4 branches and all outputs "
        "of the current group",
        DAR + "static queries",
        group=4,
        sums=False,
        scaled=True,
    ),
    "dar-t": DepthAttention(
        "dar with queries q + c e(t), c learned, from 0",
        DAR + "static queries and time; starting c at 0 is our interpretation",
        group=4,
        sums=False,
        scaled=True,
        time=True,
    ),
}
