"""Attention over depth: each branch reads a mean of all earlier outputs, weighted by a softmax for each token.

Let v_0 be the embeddings and v_i the output of branch i = 1..N. The input of branch l, and for l = N + 1 the last
state, is

    h_l = sum_i a_li v_i,    a_l = softmax_i( q_l . (g_l v_i / rms(v_i)) ),                  (AttnRes, arXiv 2603.15031)

over the sources v_i with i < l; there is no x + f. The query q_l starts at 0, where h_l is the mean of its sources. The
scales g_l of the norm start at 1. Both are learned. Branch 1 has a single source and needs no query. With groups of S
branches there are fewer sources (`decay.DepthAttention`):

    AttnRes   v_0, the sums of the outputs of finished groups, and the sum so far of the running group
    DAR       v_0, the last outputs of finished groups, and all outputs of the running group; logits / sqrt(d). The last
              state sees all outputs of the last group (Diffusion-Adaptive Routing, arXiv 2605.20708, whose code is
              not published; Delta Attention Residuals are another method of this short name)
    DAR, t    DAR with q_l + c_l e(t), where e is the network's embedding of the time. c_l, a number for each query, is
              our reading of "zero-initialised": it starts at 0, and the paper's sum is c_l = 1

No paper defines long skips here. A merge reads the state h, and its output is one more source, which belongs to no
group: W [h, c s] + d b, or c W s + d b if the skip is added.

The implementation is plain: no kernel is fused, and the backward pass keeps the outputs of all branches.
b = batch, n = tokens, d = width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.decay import DepthAttention
from uvit_decay.runtime.precision import without_autocast

EPSILON = 1e-6  # of the norms of sources


class Source(NamedTuple):
    """Tensor that later branches read.

    Args:
        value: the tensor.
        inverse_rms: inverse of the root mean square of each token.
        columns: columns of the mixing matrix, one for each output that `value` sums.
    """

    value: Float[Tensor, "b n d"]
    inverse_rms: Float[Tensor, "b n 1"]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, value: Float[Tensor, "b n d"], columns: tuple[int, ...]) -> Source:
        """Return the source of a tensor."""
        mean_square = value.square().mean(dim=-1, keepdim=True)
        return cls(value, (mean_square + EPSILON).rsqrt(), columns)


class Sources:
    """Sources written so far: finished ones, and the sources of the running group of branches.

    Args:
        kind: the kind of attention over depth.
        embeddings: the first source, v_0.
        branches: number N of branches.
    """

    def __init__(self, kind: DepthAttention, embeddings: Float[Tensor, "b n d"], branches: int) -> None:
        self.kind = kind
        self.branches = branches
        self.finished = [Source.of(embeddings, (0,))]
        self.running: list[Source] = []
        self.written = 0  # branches
        self.merged = 0  # long skips
        self.newest: Tensor | None = None  # output of the newest branch; None if a merge came after it

    def add_branch(self, output: Float[Tensor, "b n d"]) -> None:
        """Add the output of the next branch."""
        self.written += 1
        value = output.to(self.finished[0].value.dtype)
        columns = (self.written,)
        self.newest = value
        if self.kind.sums and self.running:
            before = self.running.pop()
            value = before.value + value
            columns = before.columns + columns
        self.running.append(Source.of(value, columns))

    def add_merge(self, output: Float[Tensor, "b n d"]) -> None:
        """Add the output of the next merge of a long skip, which is a source of its own."""
        self.merged += 1
        self.newest = None
        value = output.to(self.finished[0].value.dtype)
        self.finished.append(Source.of(value, (self.branches + self.merged,)))

    def read(self) -> list[Source]:
        """Return the sources of the next reader: the next branch or, after the last branch, the output."""
        ends_group = self.written > 0 and self.written % self.kind.group == 0
        if ends_group and self.written < self.branches and self.running:
            self.finished.append(self.running[-1])
            self.running.clear()
        return [*self.finished, *self.running]


class DepthQuery(nn.Module):
    """Query of one reader: `weights` returns the softmax over sources, and the call their weighted mean h."""

    def __init__(self, dim: int, kind: DepthAttention) -> None:
        super().__init__()
        self.kind = kind
        self.query = nn.Parameter(torch.zeros(dim))
        self.norm = nn.Parameter(torch.ones(dim))
        self.time = nn.Parameter(torch.zeros(1)) if kind.time else None

    def weights(self, sources: Sequence[Source], time: Float[Tensor, "b d"] | None) -> Float[Tensor, "b n sources"]:
        """Return the softmax a over the sources for each token; queries with time need the embedding e(t)."""
        query = self.query
        if self.time is not None:
            query = query + self.time * time
        query = (self.norm * query)[..., None]  # (d, 1), or (b, d, 1)
        products = [(source.value @ query) * source.inverse_rms for source in sources]
        logits = torch.cat(products, dim=-1)
        if self.kind.scaled:
            logits = logits * query.shape[-2] ** -0.5
        return logits.softmax(dim=-1)

    def forward(self, weights: Float[Tensor, "b n sources"], sources: Sequence[Source]) -> Float[Tensor, "b n d"]:
        """Return sum_i a_i v_i."""
        first, *others = weights.split(1, dim=-1)
        h = first * sources[0].value
        for weight, source in zip(others, sources[1:], strict=True):
            h = torch.addcmul(h, weight, source.value)
        return h


class MixingSums:
    """Sums of the weights of all readers over the tokens of several forward passes, on the device of the network.

    A branch behind the merge of a long skip is read twice, before and after it; the reading after it is the branch's.
    """

    def __init__(self, branches: int, merges: int) -> None:
        self.branches = branches
        self.merges = merges
        self._totals: dict[tuple[int, int], Tensor] = {}  # by number of branches and of merges before the reader
        self._columns: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self._tokens: dict[tuple[int, int], int] = {}

    @torch.no_grad()
    def add(self, sources: Sources, seen: Sequence[Source], weights: Float[Tensor, "b n sources"]) -> None:
        """Add the weights with which a reader has seen these sources."""
        key = sources.written, sources.merged
        total = weights.detach().sum(dim=(0, 1))
        if key in self._totals:
            total = self._totals[key] + total
        self._totals[key] = total
        self._columns[key] = [source.columns for source in seen]
        self._tokens[key] = self._tokens.get(key, 0) + weights.shape[0] * weights.shape[1]

    def sums(self) -> Float[Tensor, "rows columns"]:
        """Return the sums of the rows of the mixing matrix and, in a last column, the numbers of tokens; float64.

        The sums of several processes may be added; `mixing_of` turns sums into the matrix. Waits for the device.
        """
        found = torch.zeros(self.branches + 1, self.branches + self.merges + 2, dtype=torch.float64)
        found[0, 0] = found[0, -1] = 1.0  # the first branch reads the embeddings alone
        for written, merged in sorted(self._totals):
            key = written, merged
            row = torch.zeros(found.shape[1], dtype=torch.float64)
            for columns, total in zip(self._columns[key], self._totals[key].tolist(), strict=True):
                row[list(columns)] += total
            row[-1] = self._tokens[key]
            found[written] = row
        return found


def mixing_of(sums: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows sources"]:
    """Return the mixing matrix, the mean over tokens, given the sums of `MixingSums`."""
    return sums[:, :-1] / sums[:, -1:]


class DepthReader(nn.Module):
    """Queries of all readers except the first: branches 2..N and the output."""

    def __init__(self, kind: DepthAttention, branches: int, dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.branches = branches
        self.queries = nn.ModuleList([DepthQuery(dim, kind) for _ in range(branches)])
        self.measured: MixingSums | None = None  # to which readers add their weights

    def forward(self, sources: Sources, time: Float[Tensor, "b d"] | None) -> Float[Tensor, "b n d"]:
        """Return the input of the next branch or, after the last branch, the last state."""
        seen = sources.read()
        with without_autocast(seen[0].value):
            query = self.queries[sources.written - 1]
            weights = query.weights(seen, time)
            if self.measured is not None:
                self.measured.add(sources, seen, weights)
            return query(weights, seen)

    @torch.no_grad()
    def measure(self, network: nn.Module, inputs: Sequence[Tensor], merges: int) -> Float[Tensor, "rows sources"]:
        """Return the mixing matrix of `network(*inputs)`, averaged over tokens, see `decay.mixing_matrix`."""
        measured = MixingSums(self.branches, merges)
        self.measured = measured
        try:
            network(*inputs)
        finally:
            self.measured = None
        return mixing_of(measured.sums())
