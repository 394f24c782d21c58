"""Decayed identity shortcuts: the schedules of the paper and the quantities that follow from them.

"Residual Connections Harm Generative Representation Learning" (CVPR 2026). A residual branch f_k computes

    x_{k+1} = alpha_k x_k + f_k(x_k)                                                        (Eq. 3)

where alpha_k falls with depth from 1 to alpha_min. A transformer block has two branches, attention (k even) and MLP
(k odd), so L blocks have N = 2 L branches in execution order; a ResNet's block has one, so N = L. Notation:
k = 0..N-1 counts residual branches, `alpha_min` in (0, 1] is the last alpha, u in [0, 1] is the depth of a branch.
alpha_min = 1 is the ordinary network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from uvit_decay.runtime.errors import UserError, check_choice

Schedule = Literal["linear", "cosine", "constant", "constant-branch", "learnable"]
Granularity = Literal["branch", "block"]
Index = Literal["code", "v2", "v1"]
Branches = Literal["both", "attention", "mlp"]

SQRT_HALF = math.sqrt(0.5)


@dataclass(frozen=True)
class Shortcuts:
    """The weights of a network's residual branches: x <- alphas[k] x + betas[k] f_k(x), k in execution order."""

    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    learnable: bool = False

    def weights(self, k: int, learned: Tensor) -> tuple[float | Tensor, float]:
        """Return alpha and beta of branch k; alpha is that of `learned` if the alphas are learned."""
        return (learned if self.learnable else self.alphas)[k], self.betas[k]


def decayed_add(x: Tensor, f: Tensor, alpha: float | Tensor, beta: float | Tensor = 1.0) -> Tensor:
    """Return alpha x + beta f (Eq. 3), with beta = 1 as one fused multiply-add in place of the ordinary addition.

    `alpha` is a number, or a scalar tensor if it is learned; `beta` a number, or a tensor that broadcasts to f. x and f
    have the same shape; the dtype is their promotion.
    """
    if isinstance(beta, Tensor) or beta != 1.0:
        f = beta * f
    if isinstance(alpha, Tensor):
        return torch.addcmul(f, alpha.to(x.dtype), x)
    return torch.add(f, x, alpha=alpha)


def shortcuts(
    blocks: int,
    alpha_min: float,
    schedule: Schedule = "linear",
    granularity: Granularity = "branch",
    index: Index = "code",
    branches: Branches = "both",
    per_block: Literal[1, 2] = 2,
) -> Shortcuts:
    """Return the shortcut weights of `per_block` * `blocks` residual branches.

    Args:
        blocks: number of decayed blocks L.
        alpha_min: weight of the deepest identity shortcut, in (0, 1].
        schedule: `linear` (Eq. 5, the paper's); `cosine` (Table 3a; the paper gives no formula, this one is
            alpha_min + (1 - alpha_min)(1 + cos(pi u)) / 2); `constant` sqrt(1/2) (x + f) and `constant-branch`
            x + sqrt(1/2) f (Table 3b; both need alpha_min = 1, which they do not use); `learnable`, one weight a branch
            initialised with the linear schedule (Table 5; the paper gives no initial values; ones for alpha_min = 1).
        granularity: `branch`, one alpha for each branch (the authors' code); `block`, one for both branches of a block.
        index: `code` u = k / (N - 1), from exactly 1 to exactly alpha_min; `v2` u = (k + 1) / N (Eq. 5 of the paper's
            second version); `v1` u = k / N (first version: never reaches alpha_min).
        branches: decay only the `attention` or only the `mlp` branches, the others keep alpha = 1 (Table 3b).
        per_block: residual branches of a block: 2 in a transformer, 1 in a ResNet, where `granularity` and `branches`
            have no meaning and must be left alone.
    """
    if not 0.0 < alpha_min <= 1.0:
        raise UserError(
            f"alpha_min must lie in (0, 1], got {alpha_min}: 1 is the ordinary network, the paper uses 0.6 to 0.8"
        )
    check_choice(Schedule, schedule=schedule)
    check_choice(Granularity, granularity=granularity)
    check_choice(Index, index=index)
    check_choice(Branches, branches=branches)
    count = per_block * blocks
    if blocks < 1:
        raise UserError(f"a schedule needs at least one block, got {blocks}")
    if per_block == 1 and (granularity, branches) != ("branch", "both"):
        raise UserError(
            "a ResNet's block has one residual branch, neither attention nor MLP: leave out granularity and branches"
        )
    if schedule in ("constant", "constant-branch", "learnable") and branches != "both":
        raise UserError(f"the schedule {schedule!r} is for both kinds of branches, got branches {branches!r}")
    if schedule in ("constant", "constant-branch"):
        if alpha_min != 1.0:
            raise UserError(f"the schedule {schedule!r} has no alpha_min, got {alpha_min}: set alpha_min to 1")
        alpha = SQRT_HALF if schedule == "constant" else 1.0
        return Shortcuts((alpha,) * count, (SQRT_HALF,) * count)

    curve = _cosine if schedule == "cosine" else _linear
    repeat = 1 if granularity == "branch" else 2
    alphas = [curve(u, alpha_min) for u in _depths(count // repeat, index) for _ in range(repeat)]
    if branches == "attention":
        alphas[1::2] = [1.0] * blocks
    if branches == "mlp":
        alphas[0::2] = [1.0] * blocks
    return Shortcuts(tuple(alphas), (1.0,) * count, learnable=schedule == "learnable")


def _linear(u: float, alpha_min: float) -> float:
    """Return 1 - (1 - alpha_min) u (Eq. 5)."""
    return 1.0 - (1.0 - alpha_min) * u


def _cosine(u: float, alpha_min: float) -> float:
    """Return alpha_min + (1 - alpha_min)(1 + cos(pi u)) / 2, for Table 3a."""
    return alpha_min + (1.0 - alpha_min) * 0.5 * (1.0 + math.cos(math.pi * u))


def _depths(n: int, index: Index) -> list[float]:
    """Return the depth u of each of n branches or blocks, see `index` of `shortcuts`."""
    if index == "code":
        return [k / max(n - 1, 1) for k in range(n)]
    return [(k + (index == "v2")) / n for k in range(n)]


def effective_decay(alphas: Sequence[float], exclude_last_block: bool = False) -> float:
    """Return alpha_eff (Eq. 4), the product of all alphas: the weight of the input in the last block's output.

    `exclude_last_block` leaves out the last two branches, which gives the weight in the last block's input; this count
    reproduces the bins of the paper's Table 2 best.
    """
    return math.prod(alphas[:-2] if exclude_last_block else alphas, start=1.0)


def alpha_min_for(target: float, branches: int, exclude_last_block: bool = False) -> float:
    """Return the alpha_min whose linear schedule over `branches` residual branches has the effective decay `target`.

    The paper's best runs have an effective decay of 1e-3 to 1e-2 (Table 2). Solved by bisection to 1e-12; raises a
    UserError for a target that no alpha_min in (0, 1] reaches.
    """
    if not 0.0 < target <= 1.0:
        raise UserError(f"the effective decay must lie in (0, 1], got {target}")
    if branches < 2 or branches % 2:
        raise UserError(f"branches come in pairs (attention, MLP), got {branches}")

    def reached(alpha_min: float) -> float:
        return effective_decay(shortcuts(branches // 2, alpha_min).alphas, exclude_last_block)

    low, high = 1e-12, 1.0
    if target == 1.0:
        return 1.0
    if reached(low) > target:
        raise UserError(f"no alpha_min reaches an effective decay of {target} over {branches} branches")
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < target else (low, middle)
    return high
