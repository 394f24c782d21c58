"""A connection: one way around a residual branch f. All kinds of the table (`uvit_decay.decay.table`) are connections.

The plain connection is x <- x + f(x). Others weight the sum, gate it, or carry several streams or all earlier outputs.
b = batch, n = tokens, d = width; N = number of branches of a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.terminal.errors import UserError

Tokens = Float[Tensor, "b n d"]
Keep = Float[Tensor, "b 1 1"]
State = Any  # what the blocks carry from branch to branch; a connection chooses it


@dataclass(frozen=True)
class Plan:
    """Depths, alpha_min and width from which the connections of a network are built.

    Args:
        depths: depth u_k in [0, 1] of each of the N branches in execution order, 0 where `branches` leaves it out.
        alpha_min: weight of the deepest identity shortcut, in (0, 1].
        width: width d of the tokens; 0 if only numbers are needed.
    """

    depths: tuple[float, ...]
    alpha_min: float = 1.0
    width: int = 0

    @property
    def branches(self) -> int:
        """The number N of branches."""
        return len(self.depths)


class Connection(nn.Module):
    """One way around a residual branch (abstract): a subclass is built as `connection(branch, plan)`, with its `Plan`.

    A network of N branches, two per transformer block, has N + 1 connections: one per branch, in execution order, and
    the last, `branch` N, which only ends the state. A pass through the network is

        state = connection_0.start(tokens, time)
        normed = connection_k.rescale(norm_k(connection_k.read(state)))    for each branch k
        state = connection_k(state, f_k(normed))
        tokens = connection_N.end(state)

    A subclass needs `forward`; it overrides `start`, `read` and `end` if its state is not the tokens, `rescale` if it
    changes the output of the norm, and `merge` if a long skip is more than an addition to its state. Rules:

    - **Shapes.** `start` gets tokens (b, n, d); `read` and `end` return tokens (b, n, d). The state is a tensor, or a
      tuple of a fixed number of tensors and other objects.
    - **No change in place.** A method returns a new state: blocks are recomputed under activation checkpointing.
    - **Precision.** A state keeps the dtype of the tokens, float32 under autocast; `output` has autocast's dtype. So
      use sums and products by element, or `without_autocast`, on the way of the state.
    - **Parameters** are in the state_dict as `connections.k.*`. They are built after the other weights are initialised,
      are trained without weight decay, and must all have a gradient: those of connection N must serve `end`. FSDP
      needs at least one dimension.
    - **Compilation.** Blocks share one graph if connections differ only in tensors: a number that differs between
      branches is a buffer. If a state grows with depth, hide it in an object of a plain class and decorate the methods
      that read what grows with `torch.compiler.disable`.
    """

    plain = False
    """True if a network with new connections computes the same as the plain network with the same other weights."""

    def __init__(self, branch: int = 0, plan: Plan | None = None) -> None:
        super().__init__()
        self.shared: dict[str, nn.Module] = {}
        """Modules that all connections of a network share, by the names under which the network registers them."""

    @classmethod
    def build(cls, plan: Plan) -> Sequence[Connection]:
        """Return the N + 1 connections of a network; override it if they share modules."""
        return [cls(branch, plan) for branch in range(plan.branches + 1)]

    def start(self, tokens: Tokens, time: Float[Tensor, "b d"] | None = None) -> State:
        """Return the state before the first branch, given the embedded tokens and, in a denoiser, the embedded time."""
        return tokens

    def read(self, state: State) -> Tokens:
        """Return the input of this branch, before its norm."""
        return state

    def rescale(self, normed: Tokens) -> Tokens:
        """Return the output of the branch's norm, as the branch receives it."""
        return normed

    def forward(self, state: State, output: Tokens, keep: Keep | None = None) -> State:
        """Return the state after this branch, given its output f; `keep` (b, 1, 1) multiplies f (stochastic depth)."""
        raise NotImplementedError

    def merge(self, state: State, merged: Tokens, added: bool) -> State:
        """Return the state after the merge of a long skip before this branch.

        Args:
            state: the state before the merge.
            merged: W [end(state), s] + b, which takes the place of the tokens; with `added`, W s + b, which is added.
            added: see `merged`.
        """
        return state + merged if added else merged

    def end(self, state: State) -> Tokens:
        """Return the tokens that heads, long skips, probes and auxiliary losses see before this branch."""
        return self.read(state)


def check_connections(connections: Sequence[Connection], width: int, has_time: bool) -> None:
    """Run connections once on small tokens; a wrong shape, or a parameter without a gradient, is a UserError."""
    modules = nn.ModuleList([*connections, *connections[0].shared.values()])
    device = next((parameter.device for parameter in modules.parameters()), None)  # meta for a network to be loaded
    tokens = torch.ones(1, 2, width, device=device, requires_grad=True)
    time = torch.ones(1, width, device=device) if has_time else None
    with torch.enable_grad():
        state = connections[0].start(tokens, time)
        for branch, connection in enumerate(connections):
            _check_tokens("end", branch, connection, connection.end(state), tokens)
            if branch < len(connections) - 1:
                read = connection.read(state)
                _check_tokens("read", branch, connection, read, tokens)
                state = connection(state, connection.rescale(read))
        loss = connections[-1].end(state).sum()
    named = []
    for branch, connection in enumerate(connections):
        for name, parameter in connection.named_parameters():
            named.append((f"{type(connection).__name__} of branch {branch}", name, parameter))
    parameters = [parameter for _, _, parameter in named]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
    for (connection, name, _), gradient in zip(named, gradients, strict=True):
        if gradient is None:
            raise UserError(
                f"{connection} has a parameter without a gradient, {name}: build it only in the connections that use it"
            )


def _check_tokens(method: str, branch: int, connection: Connection, found: object, tokens: Tokens) -> None:
    """Raise a UserError unless a method returned tokens in the shape of `tokens`."""
    if not isinstance(found, Tensor) or found.shape != tokens.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"{method} of {type(connection).__name__}, branch {branch}, returns {shape} for tokens of the shape "
            f"{tuple(tokens.shape)}: it must return (b, n, d)"
        )
