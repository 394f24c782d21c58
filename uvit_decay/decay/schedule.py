"""Decayed identity shortcuts: the weights of a network's residual branches and the quantities that follow from them.

"Residual Connections Harm Generative Representation Learning" (CVPR 2026). A residual branch f_k computes

    x_{k+1} = alpha_k x_k + f_k(x_k)                                                        (Eq. 3)

where alpha_k falls with depth from 1 to alpha_min. A transformer block has two branches, attention (k even) and MLP
(k odd), so L blocks have N = 2 L branches in execution order. A ResNet's block has one branch, so N = L. Notation:
k = 0..N-1 counts residual branches, `alpha_min` in (0, 1] is the last alpha, u in [0, 1] is the depth of a branch.
alpha_min = 1 is the ordinary network. Other kinds of shortcuts are entries of `uvit_decay.decay.table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch

from uvit_decay.decay.connection import Connection, Plan
from uvit_decay.decay.table import SHORTCUTS, Kind
from uvit_decay.decay.weights import Shortcuts, check_finite, weighted
from uvit_decay.terminal.errors import UserError, check_choice, explain
from uvit_decay.terminal.typed import Bounds, Within, check_types

# A schedule is an entry of the table, a class of connections, numbers of all branches (alphas, or pairs of alpha and
# beta), or a function that returns these numbers for a number of branches: `--trust mine --model.net.schedule
# mine.late` (docs/extending.md). Networks record the numbers that a function returns, and the name of a class.
Numbers = Sequence[float | Sequence[float]]


def schedule_type() -> Any:
    """Return the type of schedules with the names that the tables have at this time.

    `uvit_decay.decay.Schedule` is this type, built at each access: a module of the user may add names to the tables
    before a command line or a checkpoint is read.
    """
    return Literal[*SHORTCUTS] | Sequence[float | Sequence[float]] | type[Connection] | Callable[[int], Numbers]


Schedule = str | Numbers | Callable[[int], Numbers]  # for annotations; its names are looked up when used
MOST_BLOCKS = 100_000
Granularity = Literal["branch", "block"]
Index = Literal["code", "v2", "v1"]
Branches = Literal["both", "attention", "mlp"]


@check_types
def shortcuts(
    blocks: Annotated[int, Bounds(1, MOST_BLOCKS)],
    alpha_min: Annotated[float, Within("(0, 1]")],
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
        schedule: a name in `SHORTCUTS` of `uvit_decay.decay.table`, of which `linear` is the paper's; a class of
            connections (`uvit_decay.decay.connection.Connection`); a list with an alpha, or a pair of alpha and beta,
            for each branch; or a function (number of branches) -> list.
        granularity: `branch`, one alpha for each branch (the authors' code); `block`, one for both branches of a block.
        index: `code` u = k / (N - 1), from exactly 1 to exactly alpha_min; `v2` u = (k + 1) / N (Eq. 5 of the paper's
            second version); `v1` u = k / N (first version: never reaches alpha_min).
        branches: decay `both` kinds of branches, or only the `attention` or the `mlp` branches, while the others keep
            alpha = 1 (Table 3b).
        per_block: residual branches of a block: 2 in a transformer, 1 in a ResNet. A ResNet needs the default
            `granularity` and `branches`.
    """
    if per_block == 1 and (granularity, branches) != ("branch", "both"):
        raise UserError("a ResNet's block has one residual branch; leave out granularity and branches")
    kind = None  # of numbers and functions
    if isinstance(schedule, str):
        check_choice(SHORTCUTS, schedule=schedule)
        kind = SHORTCUTS[schedule]
    elif isinstance(schedule, type) and issubclass(schedule, Connection):
        kind = Kind("", "", schedule.build, numbers=False)
    _check_kind(kind, schedule, alpha_min, branches, per_block)
    count = per_block * blocks
    if kind is None:
        numbers = schedule(count) if callable(schedule) else schedule
        return read_weights(numbers, count)
    plan = Plan(tuple(_branch_depths(count, granularity, index, branches)), alpha_min)
    if not kind.numbers:
        ones = (1.0,) * count
        name = schedule if isinstance(schedule, str) else f"{schedule.__module__}.{schedule.__qualname__}"
        return Shortcuts(ones, ones, ones, build=kind.build, plan=plan, name=name)
    weights = kind.build(plan)
    if kind.gains:
        return replace(weights, alphas=(1.0,) * count, betas=weights.gains)
    return weights


def _check_kind(kind: Kind | None, schedule: Schedule, alpha_min: float, branches: Branches, per_block: int) -> None:
    """Raise a UserError for a schedule that does not fit the other arguments of `shortcuts`."""
    falls = kind is not None and kind.falls
    if not falls and alpha_min != 1.0:
        raise UserError(f"the schedule {schedule!r} has no alpha_min, got {alpha_min}; set `alpha_min` to 1")
    if (not falls or schedule == "learnable") and branches != "both":
        raise UserError(
            f"the schedule {schedule!r} is for both kinds of branches, got {branches!r}; set `branches` to both"
        )
    if per_block == 1 and kind is not None and (kind.blocks or not kind.numbers):
        raise UserError(f"the schedule {schedule!r} is for the blocks of transformers, not for a ResNet; use linear")


def _branch_depths(count: int, granularity: Granularity, index: Index, branches: Branches) -> list[float]:
    """Return the depth u of each of the `count` residual branches; see the arguments of `shortcuts`."""
    if granularity == "branch":
        depths = _depths(count, index)
    else:
        depths = []
        for u in _depths(count // 2, index):
            depths += [u, u]  # attention and MLP of a block
    if branches != "both":
        left_out = 1 if branches == "attention" else 0
        depths[left_out::2] = [0.0] * (count // 2)
    return depths


def read_weights(numbers: object, count: int) -> Shortcuts:
    """Return the shortcuts of a list of alphas, or of pairs (alpha, beta), one entry for each of `count` branches."""
    wanted = f"a schedule given as a list needs an alpha, or a pair of alpha and beta, for each of the {count} branches"
    with explain(wanted, TypeError, ValueError, RuntimeError, OverflowError):
        values = torch.as_tensor(numbers, dtype=torch.float64, device="cpu")
    if values.shape not in ((count,), (count, 2)):
        raise UserError(f"{wanted}, got numbers of the shape {tuple(values.shape)}")
    if values.ndim == 1:
        values = torch.stack([values, torch.ones_like(values)], dim=1)
    alphas, betas = values.unbind(dim=1)
    if not values.float().isfinite().all():
        raise UserError(f"{wanted}, with numbers that are finite in float32")
    if not alphas.cumprod(dim=0).float().isfinite().all():
        raise UserError(f"the product of the {count} alphas of this schedule exceeds float32; choose smaller alphas")
    return weighted(alphas.tolist(), betas.tolist())


def _depths(n: int, index: Index) -> list[float]:
    """Return the depth u of each of n branches or blocks, see `index` of `shortcuts`."""
    if index == "code":
        return [k / max(n - 1, 1) for k in range(n)]
    first = 1 if index == "v2" else 0
    return [(k + first) / n for k in range(n)]


@check_types
def effective_decay(alphas: Sequence[float], exclude_last_block: bool = False) -> float:
    """Return alpha_eff (Eq. 4), the product of all alphas: the weight of the input in the last block's output.

    With `exclude_last_block` the last two branches are left out: the weight of the input in the last block's input. It
    reproduces the bins of the paper's Table 2 best.
    """
    check_finite(alphas=alphas)
    factors = alphas[:-2] if exclude_last_block else alphas
    return math.prod(factors, start=1.0)


@check_types
def alpha_min_for(
    target: Annotated[float, Within("(0, 1]")],
    branches: Annotated[int, Bounds(1, 2 * MOST_BLOCKS)],
    exclude_last_block: bool = False,
) -> float:
    """Return the alpha_min whose linear schedule over `branches` residual branches has the effective decay `target`.

    The effective decay is between 1e-3 and 1e-2 in the paper's best MAEs of 12 and 18 blocks (Table 2) and in its
    SiT-XL. It is 3.1e-4 in the best MAE of 24 blocks, and 0.013, 0.026 and 3.5e-4 in the U-ViTs with the best FIDs
    (Table 4). The result is accurate to 1e-12.

    Raises:
        UserError: no alpha_min in (0, 1] reaches the target, or the number of branches is odd.
    """
    if branches % 2:
        raise UserError(f"branches come in pairs (attention, MLP), got {branches}")

    def compute_decay(alpha_min: float) -> float:
        return effective_decay(shortcuts(branches // 2, alpha_min).alphas, exclude_last_block)

    low, high = 1e-12, 1.0
    if target == 1.0:
        return 1.0
    if compute_decay(low) > target:
        raise UserError(
            f"no alpha_min reaches an effective decay of {target} over {branches} branches; choose a larger decay"
        )
    while high - low > 1e-12:
        middle = (low + high) / 2
        if compute_decay(middle) < target:
            low = middle
        else:
            high = middle
    return high
