"""Hyper-connections: several residual streams instead of one (Zhu et al., ICLR 2025, arXiv 2409.19606, Sec. 2.1).

Branch k reads a weighted sum of the n streams H, and writes to all of them, with learned numbers of each branch:

    h = A_m^T H,    H <- A_r^T H + B^T f(h)                                      (static hyper-connections)

A_m (n) starts as e_(k mod n), A_r (n, n) as the identity and B (n) as ones. All streams start as the tokens and end in
their mean (the paper: their sum, which a norm behind it does not tell apart). So the network starts as the plain one. A
long skip, which the paper does not have, reads the mean, and each stream gets the change that its merge makes of it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.decay.connection import Connection, Keep, Plan, Tokens

Streams = tuple[Tokens, ...]


class HyperConnection(Connection):
    """Static hyper-connection with n `streams`; see the module docstring."""

    plain = True

    def __init__(self, branch: int, plan: Plan, streams: int = 2) -> None:
        super().__init__()
        self.streams = streams
        if branch < plan.branches:
            identity = torch.eye(streams)
            self.reads = nn.Parameter(identity[branch % streams].clone())  # A_m
            self.mixes = nn.Parameter(identity)  # A_r
            self.writes = nn.Parameter(torch.ones(streams))  # B

    def start(self, tokens: Tokens, time: Float[Tensor, "b d"] | None = None) -> Streams:
        return tokens.expand(self.streams, *tokens.shape).unbind()

    def read(self, state: Streams) -> Tokens:
        return self._sum(self.reads, state)

    def forward(self, state: Streams, output: Tokens, keep: Keep | None = None) -> Streams:
        if keep is not None:
            output = output * keep
        written = []
        for weights, beta in zip(self.mixes.unbind(dim=1), self.writes, strict=True):
            written.append(torch.addcmul(self._sum(weights, state), beta, output))
        return tuple(written)

    def merge(self, state: Streams, merged: Tokens, added: bool) -> Streams:
        change = merged if added else merged - self.end(state)
        return tuple(stream + change for stream in state)

    def end(self, state: Streams) -> Tokens:
        return torch.stack(state).mean(dim=0)

    def _sum(self, weights: Float[Tensor, " n"], state: Streams) -> Tokens:
        """Return the weighted sum of the streams."""
        first, *others = state
        total = weights[0] * first
        for weight, stream in zip(weights[1:], others, strict=True):
            total = torch.addcmul(total, weight, stream)
        return total
