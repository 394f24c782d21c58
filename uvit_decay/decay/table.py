"""The table of shortcuts: how each kind connects what a branch reads and writes (`uvit_decay.decay.connection`).

A kind is one function and one entry of `SHORTCUTS`, which the command line, the networks, `attach`, the tests and
docs/shortcuts.md read. Most kinds are numbers: x <- alpha x + beta f(scale norm(x)). Notation: k = 0..N-1 counts
residual branches in execution order, u_k in [0, 1] is the depth of a branch (0 where `branches` leaves it out), a is
`alpha_min`, P_k = alpha_0 ... alpha_{k-1} is the weight of the input in the input of branch k, and l = 1..L counts
transformer blocks of two branches each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvit_decay.decay.connection import Connection, Plan
from uvit_decay.decay.streams import HyperConnection
from uvit_decay.decay.weights import Shortcuts, weighted

SQRT_HALF = math.sqrt(0.5)
MP_SUM = 0.3  # EDM2's t, the share of the branch


@dataclass(frozen=True)
class Kind:
    """A kind of shortcut.

    Args:
        formula: the numbers of a branch, and its equation if it is not x <- alpha x + f(norm(x)).
        source: paper or page.
        build: function (plan) -> the numbers of all branches (`weighted`); without `numbers`, -> the N + 1 connections.
        numbers: whether the connections are numbers. Only they have gains and a mixing matrix without a batch, and
            fit `attach`.
        falls: whether they depend on alpha_min, granularity, index and branches. If not, alpha_min and branches must
            keep their defaults; granularity and index are ignored.
        gains: whether the shortcuts are plain, with the `gains` of these weights as betas: the same function.
        blocks: whether it needs blocks of two branches, channels of one width, or layers that read the stream through
            norms, so that it does not fit a ResNet. Connections that are not numbers never fit it.
        plain_start: whether the network equals the plain network at the start of training, with the same weights, if
            all branches start at 0 (`zero_init`, SiT).
    """

    formula: str
    source: str
    build: Callable[[Plan], Shortcuts | Sequence[Connection]]
    numbers: bool = True
    falls: bool = False
    gains: bool = False
    blocks: bool = False
    plain_start: bool = False


def _linear(plan: Plan) -> list[float]:
    return [1.0 - (1.0 - plan.alpha_min) * u for u in plan.depths]


def _cosine(plan: Plan) -> list[float]:
    a = plan.alpha_min
    return [a + (1.0 - a) * 0.5 * (1.0 + math.cos(math.pi * u)) for u in plan.depths]


def _mp_sum(plan: Plan) -> Shortcuts:
    norm = math.hypot(1.0 - MP_SUM, MP_SUM)
    return weighted([(1.0 - MP_SUM) / norm] * plan.branches, MP_SUM / norm)


def _depth_scaled(plan: Plan) -> Shortcuts:
    scales = [1.0 / math.sqrt(k // 2 + 1) for k in range(plan.branches)]
    return weighted([1.0] * plan.branches, scales=scales)


def _layerscale(plan: Plan) -> Shortcuts:
    blocks = plan.branches // 2
    initial = 1e-6
    if blocks <= 18:
        initial = 1e-1
    elif blocks <= 24:
        initial = 1e-5
    return weighted([1.0] * plan.branches, initial, learned="betas", per_channel=True)


def _attend(plan: Plan, **routing: Any) -> Sequence[Connection]:
    """Return the connections of attention over depth, see `uvit_decay.decay.depth_attention.Routing`."""
    # Imported here, because the import loads torch's compiler, which takes a second.
    from uvit_decay.decay.depth_attention import DepthAttention, Routing

    return DepthAttention.build(plan, Routing(**routing))


PAPER = "Residual Connections Harm Generative Representation Learning, "
ATTNRES = "AttnRes (Kimi Team, arXiv 2603.15031)"
DAR = "Diffusion-Adaptive Routing (arXiv 2605.20708), "
HYPER = "Hyper-Connections (Zhu et al., ICLR 2025), static, Sec. 2.1"
SHORTCUTS: dict[str, Kind] = {
    "linear": Kind(
        "alpha_k = 1 - (1 - a) u_k",
        PAPER + "Eq. 5",
        lambda plan: weighted(_linear(plan)),
        falls=True,
    ),
    "cosine": Kind(
        "alpha_k = a + (1 - a) (1 + cos(pi u_k)) / 2",
        PAPER + "Table 3a, which gives no formula",
        lambda plan: weighted(_cosine(plan)),
        falls=True,
    ),
    "learnable": Kind(
        "alpha_k learned, starting from linear",
        PAPER + "Table 5, which gives no initial values",
        lambda plan: weighted(_linear(plan), learned="alphas"),
        falls=True,
    ),
    "constant": Kind(
        "sqrt(1/2) (x + f)",
        PAPER + "Table 3b",
        lambda plan: weighted([SQRT_HALF] * plan.branches, SQRT_HALF),
    ),
    "constant-branch": Kind(
        "x + sqrt(1/2) f",
        PAPER + "Table 3b",
        lambda plan: weighted([1.0] * plan.branches, SQRT_HALF),
        plain_start=True,
    ),
    "gain": Kind(
        "x + f / P_{k+1}, with the P of linear: for the same initial weights, the same function as linear, up to the "
        "norms' eps",
        "the control of docs/equivalence.md",
        lambda plan: weighted(_linear(plan)),
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
        lambda plan: weighted([1.0] * plan.branches, 0.0, learned="betas"),
        plain_start=True,
    ),
    "attnres": Kind(
        "softmax-weighted mean of all earlier outputs, by a learned query for each branch",
        ATTNRES,
        _attend,
        numbers=False,
    ),
    "attnres-2": Kind(
        "attnres over sums of groups of 2 branches",
        ATTNRES,
        partial(_attend, group=2),
        numbers=False,
    ),
    "attnres-4": Kind(
        "attnres over sums of groups of 4 branches",
        ATTNRES,
        partial(_attend, group=4),
        numbers=False,
    ),
    "attnres-8": Kind(
        "attnres over sums of groups of 8 branches",
        ATTNRES,
        partial(_attend, group=8),
        numbers=False,
    ),
    "dar": Kind(
        "as attnres, with logits / sqrt(d), over the last output of each finished group of 4 branches and all outputs "
        "of the current group",
        DAR + "static queries",
        partial(_attend, group=4, sums=False, scaled=True),
        numbers=False,
    ),
    "dar-t": Kind(
        "dar with queries q + c e(t), c learned, from 0",
        DAR + "static queries and time; starting c at 0 is our interpretation",
        partial(_attend, group=4, sums=False, scaled=True, time=True),
        numbers=False,
    ),
    "hyper-2": Kind(
        "two streams H: f reads A_m^T H, H <- A_r^T H + B^T f, with learned A_m, A_r and B for each branch",
        HYPER,
        HyperConnection.build,
        numbers=False,
        plain_start=True,
    ),
}
BUILT_IN = tuple(SHORTCUTS)  # without the entries that modules of users add later
