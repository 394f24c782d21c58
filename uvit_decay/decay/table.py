"""The table of shortcuts: how each kind weights the identity and the branch, x <- alpha x + beta f(scale norm(x)).

A kind is one function and one entry of `SHORTCUTS`, which the command line, the networks, `attach`, the tests and
docs/training.md read. Notation: k = 0..N-1 counts residual branches in execution order, u_k in [0, 1] is the depth of a
branch (0 where `branches` leaves it out), a is `alpha_min`, P_k = alpha_0 ... alpha_{k-1} is the weight of the input in
the input of branch k, and l = 1..L counts transformer blocks of two branches each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from uvit_decay.runtime.errors import UserError

SQRT_HALF = math.sqrt(0.5)
MP_SUM = 0.3  # EDM2's t, the share of the branch
NAMES = ("alphas", "betas", "scales")


class Weights(NamedTuple):
    """The numbers of one branch; a tensor if it is learned, beta also one a channel."""

    alpha: float | Tensor
    beta: float | Tensor
    scale: float | Tensor


@dataclass(frozen=True)
class DepthAttention:
    """A kind of attention over depth, which replaces the shortcuts: see `uvit_decay.nn.depth_attention`.

    Args:
        formula: what a branch reads.
        source: where it comes from.
        group: number S of branches in a group.
        sums: whether a group is read as the sum of its outputs; otherwise as its last output, once it is finished.
        scaled: whether logits are divided by sqrt(d).
        time: whether queries depend on the time of a denoiser.
    """

    formula: str
    source: str
    group: int = 1
    sums: bool = True
    scaled: bool = False
    time: bool = False


@dataclass(frozen=True)
class Shortcuts:
    """The weights of all branches: x <- alphas[k] x + betas[k] f_k(scales[k] norm(x)), k in execution order.

    Args:
        alphas: weights of the identity.
        betas: weights of the branches.
        scales: factors of what the branch's norm gives.
        learned: which of them are parameters, with these initial values.
        per_channel: whether there is a beta for each channel.
        restarts: branches beside a projected shortcut that ends in a norm (a ResNet's). Its output does not depend on
            the scale of the stream, so the product P of the alphas begins there, with the branch's own alpha.
        depth: attention over depth instead of shortcuts, whose alphas and betas are then 1.
    """

    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    scales: tuple[float, ...]
    learned: Literal["alphas", "betas", "queries"] | None = None
    per_channel: bool = False
    restarts: tuple[int, ...] = ()
    depth: DepthAttention | None = None

    @property
    def recorded(self) -> tuple[str, ...]:
        """The names of what a state_dict holds: the alphas, and what is not 1 throughout."""
        return tuple(n for n in NAMES if n in ("alphas", self.learned) or set(getattr(self, n)) != {1.0})

    @property
    def gains(self) -> tuple[float, ...]:
        """beta_k / P_{k+1}: the factor of branch k in the network of plain shortcuts that is the same function.

        P begins at 1, and again at each of `restarts`.

        Raises:
            UserError: numbers that are not positive, for which there is no such network, or no step of the same sign;
                gains that exceed float32.
        """
        if min(*self.alphas, *self.betas) <= 0:
            raise UserError("the gains beta / P of branches need alphas and betas above 0: see gain and rate_over_gain")
        gains, product = [], 1.0
        for k, (alpha, beta) in enumerate(zip(self.alphas, self.betas, strict=True)):
            product = alpha if k in self.restarts else product * alpha
            gains.append(beta / product if product > 0 else math.inf)
        if not all(map(is_float32, gains)):
            raise UserError(
                f"the gains beta / P of {len(gains)} branches exceed float32: set alpha_min closer to 1; "
                "see gain and rate_over_gain"
            )
        return tuple(gains)

    def with_gains(self) -> Shortcuts:
        """Return the plain shortcuts whose branches have the gains of these, which are the same function."""
        return replace(self, alphas=(1.0,) * len(self.alphas), betas=self.gains)

    def tensor(self, name: str, dim: int) -> Tensor:
        """Return the named weights, of all branches or of all branches and `dim` channels."""
        values = torch.tensor(getattr(self, name))
        return values[:, None].repeat(1, dim) if self.per_channel and name == self.learned else values

    def plain(self, first: int = 0, last: int | None = None) -> bool:
        """Return whether branches `first` to `last` are ordinary ones, x + f(norm(x))."""
        values = (*self.alphas[first:last], *self.betas[first:last], *self.scales[first:last])
        return self.learned is None and set(values) == {1.0}


@dataclass(frozen=True)
class Kind:
    """A kind of shortcut.

    Args:
        formula: what a branch computes, where it is not x <- alpha x + f(norm(x)), and its numbers.
        source: where it comes from.
        weights: the weights of branches at the depths u_k, with `alpha_min`.
        falls: whether alpha_min, granularity, index and branches change it; else alpha_min and branches must be left
            alone, and the others change nothing.
        gains: whether the branches get the gains of these weights, on plain shortcuts.
        blocks: whether it counts blocks of two branches or weights channels, which a ResNet's stages do not have.
    """

    formula: str
    source: str
    weights: Callable[[Sequence[float], float], Shortcuts]
    falls: bool = False
    gains: bool = False
    blocks: bool = False


def is_float32(value: Any) -> bool:
    """Return whether a real number is finite in float32."""
    return bool(abs(value) <= torch.finfo(torch.float32).max)


def weighted(
    alphas: Sequence[float],
    betas: Sequence[float] | float = 1.0,
    scales: Sequence[float] | float = 1.0,
    learned: Literal["alphas", "betas"] | None = None,
    per_channel: bool = False,
) -> Shortcuts:
    """Return shortcuts with these weights; a number is that of all branches."""
    betas, scales = ((v,) * len(alphas) if isinstance(v, float) else tuple(v) for v in (betas, scales))
    return Shortcuts(tuple(alphas), betas, scales, learned, per_channel)


def _linear(depths: Sequence[float], a: float) -> list[float]:
    return [1.0 - (1.0 - a) * u for u in depths]


def _cosine(depths: Sequence[float], a: float) -> list[float]:
    return [a + (1.0 - a) * 0.5 * (1.0 + math.cos(math.pi * u)) for u in depths]


def _mp_sum(depths: Sequence[float], a: float) -> Shortcuts:
    norm = math.hypot(1.0 - MP_SUM, MP_SUM)
    return weighted([(1.0 - MP_SUM) / norm] * len(depths), MP_SUM / norm)


def _depth_scaled(depths: Sequence[float], a: float) -> Shortcuts:
    return weighted([1.0] * len(depths), scales=[1.0 / math.sqrt(k // 2 + 1) for k in range(len(depths))])


def _layerscale(depths: Sequence[float], a: float) -> Shortcuts:
    blocks = len(depths) // 2
    initial = 1e-1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
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
        "alpha_k learned, from those of linear",
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
    ),
    "gain": Kind(
        "x + f / P_{k+1}, with P of linear: the function of linear, with the same weights at the start, up to the "
        "norms' eps",
        "the control of docs/how_it_works.md",
        lambda depths, a: weighted(_linear(depths, a)),
        falls=True,
        gains=True,
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
    ),
    "layerscale": Kind(
        "x + beta_k f, beta_k learned for each channel, from 0.1 (up to 18 blocks), 1e-5 (24), 1e-6 (more)",
        "CaiT (Touvron et al., ICCV 2021)",
        _layerscale,
        blocks=True,
    ),
    "rezero": Kind(
        "x + beta_k f, beta_k learned, from 0; f is not zero-initialised",
        "ReZero (Bachlechner et al., UAI 2021)",
        lambda depths, a: weighted([1.0] * len(depths), 0.0, learned="betas"),
    ),
}

ATTNRES = "AttnRes (Kimi Team, arXiv 2603.15031)"
DEPTH_ATTENTION: dict[str, DepthAttention] = {
    "attnres": DepthAttention(
        "softmax-weighted mean of all earlier outputs, by a learned query for each branch", ATTNRES
    ),
    "attnres-2": DepthAttention("attnres over sums of groups of 2 branches", ATTNRES, group=2),
    "attnres-4": DepthAttention("attnres over sums of groups of 4 branches", ATTNRES, group=4),
    "attnres-8": DepthAttention("attnres over sums of groups of 8 branches", ATTNRES, group=8),
    "dar": DepthAttention(
        "as attnres, with logits / sqrt(d), over the last outputs of finished groups of 4 and all of the running one",
        "arXiv 2605.20708, static queries",
        group=4,
        sums=False,
        scaled=True,
    ),
    "dar-t": DepthAttention(
        "dar with queries q + c e(t), c learned, from 0",
        "arXiv 2605.20708, static queries and time; the start of c is our reading",
        group=4,
        sums=False,
        scaled=True,
        time=True,
    ),
}
