"""Connections that are numbers: x <- alpha x + beta f(scale norm(x)), with numbers of each branch.

Notation: k = 0..N-1 counts residual branches in execution order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from uvit_decay.decay.connection import Connection, Keep, Plan, Tokens
from uvit_decay.terminal.errors import UserError, check_numbers
from uvit_decay.terminal.typed import check_types

NAMES = ("alphas", "betas", "scales")


class Weights(NamedTuple):
    """Numbers of one branch; a learned one is a tensor, and a learned beta may have one value per channel."""

    alpha: float | Tensor
    beta: float | Tensor
    scale: float | Tensor


@dataclass(frozen=True)
class Shortcuts:
    """Connections of all branches: the numbers of x <- alphas[k] x + betas[k] f_k(scales[k] norm(x)), or `build`.

    Args:
        alphas: weights of the identity.
        betas: weights of the branches.
        scales: factors of the norms' outputs.
        learned: the weights that are parameters; the numbers here are their initial values.
        per_channel: whether there is a beta for each channel.
        build: function (plan) -> N + 1 connections that are not numbers; all weights are then recorded as 1.
        plan: the plan, without the width.
        name: name of connections that are not numbers: an entry of the table, or module.Class.
    """

    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    scales: tuple[float, ...]
    learned: Literal["alphas", "betas"] | None = None
    per_channel: bool = False
    build: Callable[[Plan], Sequence[Connection]] | None = None
    plan: Plan | None = None
    name: str = ""

    @property
    def recorded(self) -> tuple[str, ...]:
        """The names of the weights in a state_dict: alphas, learned weights, and weights that are not all 1."""
        names = []
        for name in NAMES:
            if name in ("alphas", self.learned) or set(getattr(self, name)) != {1.0}:
                names.append(name)
        return tuple(names)

    @property
    def fixed(self) -> bool:
        """True if all weights are fixed numbers."""
        return self.learned is None and self.build is None

    @property
    def gains(self) -> tuple[float, ...]:
        """The gains beta_k / P_{k+1} of the branches in an equivalent network with plain shortcuts; not of ResNets.

        Raises:
            UserError: alphas or betas are not positive, so that no such network exists, or gains exceed float32.
        """
        self.check_numbers("the gains beta / P of branches (gain, rate_over_gain)")
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
                "set `alpha_min` closer to 1"
            )
        return tuple(gains)

    def check_numbers(self, what: str) -> None:
        """Raise a UserError that begins with `what`, which needs numbers, if the connections are not numbers."""
        if self.build is not None:
            raise UserError(f"{what}: the schedule {self.name} is not a row of numbers; choose one that is, as linear")

    def tensor(self, name: str, dim: int) -> Tensor:
        """Return the weights called `name`, float32 (branches,), or (branches, dim) if learned for each channel."""
        values = torch.tensor(getattr(self, name))
        if self.per_channel and name == self.learned:
            return values[:, None].repeat(1, dim)
        return values

    def plain(self, first: int = 0, last: int | None = None) -> bool:
        """Return whether branches `first` to `last` (exclusive) are ordinary ones, x + f(norm(x))."""
        values = (*self.alphas[first:last], *self.betas[first:last], *self.scales[first:last])
        return self.fixed and set(values) == {1.0}

    def register(self, module: nn.Module, dim: int, persistent: bool = True) -> None:
        """Register the recorded weights as buffers of `module`, and learned weights as a parameter.

        `dim` is the number of channels, for betas of channels.
        """
        for name in self.recorded:
            values = self.tensor(name, dim)
            if name == self.learned:
                module.register_parameter(name, nn.Parameter(values))
            else:
                module.register_buffer(name, values, persistent)

    def connections(self, owner: nn.Module, dim: int) -> Sequence[Connection]:
        """Return the N + 1 connections of a network of width `dim`, in which the weights are registered."""
        if self.build is not None:
            return self.build(Plan(self.plan.depths, self.plan.alpha_min, dim))
        branches = [Weighted(self, branch, owner) for branch in range(len(self.alphas))]
        return [*branches, Weighted()]


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


def decayed_add(x: Tensor, f: Tensor, alpha: float | Tensor, beta: float | Tensor = 1.0) -> Tensor:
    """Return alpha x + beta f; if alpha or beta is 1, it is one fused multiply-add, as fast as the ordinary addition.

    Args:
        x: input of the branch.
        f: output of the branch, in the shape of x.
        alpha: weight of x, a number, or a scalar tensor if it is learned.
        beta: weight of f, a number, or a tensor that broadcasts to f.

    Returns:
        a tensor in the promoted dtype of x and f.
    """
    if not isinstance(alpha, Tensor) and alpha == 1.0:
        if isinstance(beta, Tensor):
            return torch.addcmul(x, f, beta.to(x.dtype))
        return torch.add(x, f, alpha=beta)
    if isinstance(beta, Tensor):
        f = beta.to(x.dtype) * f
    elif beta != 1.0:
        f = beta * f
    if isinstance(alpha, Tensor):
        return torch.addcmul(f, alpha.to(x.dtype), x)
    return torch.add(f, x, alpha=alpha)


class Weighted(Connection):
    """x <- alpha x + beta f(scale norm(x)), the connection of every kind that is numbers.

    Without arguments it is the plain connection, x + f(norm(x)). Learned weights are registered in `owner`.
    """

    def __init__(self, shortcuts: Shortcuts | None = None, branch: int = 0, owner: nn.Module | None = None) -> None:
        super().__init__()
        shortcuts = shortcuts or weighted([1.0])
        self.branch = branch
        self.learned = shortcuts.learned
        # In a tuple, so that it is not a submodule; without learned weights a copy of a block does not copy it.
        self.owner = (owner,) if self.learned else ()
        self.numbers = {name: getattr(shortcuts, name)[branch] for name in NAMES}
        self.varying = []  # fixed numbers that differ between branches
        for name in NAMES:
            if name != self.learned and len(set(getattr(shortcuts, name))) > 1:
                self.varying.append(name)
        self._fill(torch.device("cpu"))

    def _fill(self, device: torch.device) -> None:
        """Write on `device` what graphs read: the number of the branch, and numbers that differ between branches.

        They are tensors, because a number is a constant of a graph, which equal blocks could not share. They are made
        from the numbers again for each device and dtype.
        """
        self.index = torch.tensor([self.branch], device=device)
        self.tensors = {name: torch.tensor(self.numbers[name], device=device) for name in self.varying}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Weighted:
        """Move the module (torch's method behind `to`, `to_empty` and the like)."""
        self._fill(fn(torch.zeros((), device=self.index.device)).device)
        return super()._apply(fn, recurse)

    def weights(self) -> Weights:
        """Return alpha, beta and scale: numbers, or tensors if they are learned or, in a graph, differ."""
        in_graph = torch.compiler.is_compiling()
        weights = []
        for name in NAMES:
            if name == self.learned:
                learned = getattr(self.owner[0], name)
                if in_graph:  # weights that were created on a device, or assigned, did not move the index
                    weights.append(learned.index_select(0, self.index.to(learned.device))[0])
                else:
                    weights.append(learned[self.branch])
            elif in_graph and name in self.varying:
                weights.append(self.tensors[name])
            else:
                weights.append(self.numbers[name])
        return Weights(*weights)

    def rescale(self, normed: Tokens) -> Tokens:
        scale = self.weights().scale
        if not isinstance(scale, Tensor) and scale == 1.0:
            return normed
        return normed * scale

    def forward(self, state: Tokens, output: Tokens, keep: Keep | None = None) -> Tokens:
        alpha, beta, _ = self.weights()
        if keep is not None:
            beta = beta * keep
        return decayed_add(state, output, alpha, beta)
