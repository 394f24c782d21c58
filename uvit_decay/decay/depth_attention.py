"""Attention over depth: each branch reads a mean of all earlier outputs, weighted by a softmax for each token.

Let v_0 be the embeddings and v_i the output of branch i = 1..N. The input of branch l, and for l = N + 1 the last
state, is

    h_l = sum_i a_li v_i,    a_l = softmax_i( q_l . (g_l v_i / rms(v_i)) ),                  (AttnRes, arXiv 2603.15031)

over the sources v_i with i < l; there is no x + f. The query q_l starts at 0, where h_l is the mean of its sources. The
scales g_l of the norm start at 1. Both are learned. Branch 1 has a single source and needs no query. With groups of S
branches there are fewer sources (`Routing`):

    AttnRes   v_0, the sums of the outputs of finished groups, and the sum so far of the running group
    DAR       v_0, the last outputs of finished groups, and all outputs of the running group; logits / sqrt(d). The last
              state sees all outputs of the last group (Diffusion-Adaptive Routing, arXiv 2605.20708, whose code is
              not published; Delta Attention Residuals are another method of this short name)
    DAR, t    DAR with q_l + c_l e(t), where e is the network's embedding of the time. c_l, a number for each query, is
              our reading of "zero-initialised": it starts at 0, and the paper's sum is c_l = 1

No paper defines long skips here. A merge reads the state h, and its output is one more source, which belongs to no
group: W [h, c s] + d b, or c W s + d b if the skip is added.

The implementation is plain: no kernel is fused, and the backward pass keeps the outputs of all branches. The import of
this module loads torch's compiler, which takes a second.
b = batch, n = tokens, d = width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.decay.connection import Connection, Keep, Plan, Tokens
from uvit_decay.runtime.precision import without_autocast
from uvit_decay.terminal.errors import UserError

EPSILON = 1e-6  # of the norms of sources
SHARED = "depth_attention"  # name of the queries in a network, by which mixing.py finds them


@dataclass(frozen=True)
class Routing:
    """A kind of attention over depth.

    Args:
        group: number S of branches in a group.
        sums: whether a group is read as the sum of its outputs. Otherwise a finished group is read as its last output.
        scaled: whether logits are divided by sqrt(d).
        time: whether queries depend on the time of a denoiser.
    """

    group: int = 1
    sums: bool = True
    scaled: bool = False
    time: bool = False


class Source(NamedTuple):
    """Tensor that later branches read; `columns` of the mixing matrix, one for each output that `value` sums."""

    value: Float[Tensor, "b n d"]
    inverse_rms: Float[Tensor, "b n 1"]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, value: Float[Tensor, "b n d"], columns: tuple[int, ...]) -> Source:
        """Return the source of a tensor."""
        mean_square = value.square().mean(dim=-1, keepdim=True)
        return cls(value, (mean_square + EPSILON).rsqrt(), columns)


@dataclass(eq=False)  # not frozen: graphs would then depend on all fields, and so on the number of sources
class Sources:
    """Sources written so far, which a new object replaces at each write.

    `finished` begins with the embeddings v_0, and `running` are the sources of the running group of branches. `written`
    and `merged` count branches and merges. The embedded `time` (b, d) is None in an encoder.
    """

    kind: Routing
    branches: int
    time: Tensor | None
    finished: tuple[Source, ...]
    running: tuple[Source, ...] = ()
    written: int = 0
    merged: int = 0

    def add_branch(self, output: Tokens) -> Sources:
        """Return the sources with the output of the next branch, as the next reader sees them."""
        written = self.written + 1
        value = output.to(self.finished[0].value.dtype)
        columns = (written,)
        running = self.running
        finished = self.finished
        if self.kind.sums and running:
            *running, before = running
            value = before.value + value
            columns = before.columns + columns
        running = (*running, Source.of(value, columns))
        if written % self.kind.group == 0 and written < self.branches:  # the group is finished
            finished = (*finished, running[-1])
            running = ()
        return replace(self, finished=finished, running=running, written=written)

    def add_merge(self, output: Tokens) -> Sources:
        """Return the sources with the output of the next merge of a long skip, which is a source of its own."""
        merged = self.merged + 1
        value = output.to(self.finished[0].value.dtype)
        finished = (*self.finished, Source.of(value, (self.branches + merged,)))
        return replace(self, finished=finished, merged=merged)


class DepthQuery(nn.Module):
    """Query of one reader: `weights` returns the softmax over sources, and the call their weighted mean h."""

    def __init__(self, dim: int, kind: Routing) -> None:
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


class DepthReader(nn.Module):
    """Queries of all readers except the first: branches 2..N and the output."""

    def __init__(self, kind: Routing, branches: int, dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.branches = branches
        self.queries = nn.ModuleList([DepthQuery(dim, kind) for _ in range(branches)])

    def forward(self, sources: Sources) -> Tokens:
        """Return the input of the next branch or, after the last branch, the last state."""
        seen = (*sources.finished, *sources.running)
        with without_autocast(seen[0].value):
            query = self.queries[sources.written - 1]
            return query(query.weights(seen, sources.time), seen)


class Mixed(NamedTuple):
    """State between branches: the input h of the next branch, and the sources."""

    h: Tokens
    sources: Sources


class DepthAttention(Connection):
    """Attention over depth, whose queries are those of `reader`: a write reads the input of the next branch at once."""

    def __init__(self, reader: DepthReader) -> None:
        super().__init__()
        self.shared = {SHARED: reader}

    @classmethod
    def build(cls, plan: Plan, kind: Routing = Routing()) -> Sequence[DepthAttention]:
        reader = DepthReader(kind, plan.branches, plan.width)
        return [cls(reader) for _ in range(plan.branches + 1)]

    @torch.compiler.disable
    def start(self, tokens: Tokens, time: Float[Tensor, "b d"] | None = None) -> Mixed:
        reader = self.shared[SHARED]
        if reader.kind.time and time is None:
            raise UserError("its queries need a denoiser's time; set `schedule` to dar")
        embeddings = Source.of(tokens, (0,))
        return Mixed(tokens, Sources(reader.kind, reader.branches, time, finished=(embeddings,)))

    def read(self, state: Mixed) -> Tokens:
        return state.h

    @torch.compiler.disable
    def forward(self, state: Mixed, output: Tokens, keep: Keep | None = None) -> Mixed:
        if keep is not None:
            output = output * keep
        return self._read(state.sources.add_branch(output))

    @torch.compiler.disable
    def merge(self, state: Mixed, merged: Tokens, added: bool) -> Mixed:
        return self._read(state.sources.add_merge(merged))

    def _read(self, sources: Sources) -> Mixed:
        """Return the state of these sources."""
        return Mixed(self.shared[SHARED](sources), sources)
