"""Mixing matrix: the weight of every branch's output in the input of every later branch.

Let v_0 be the embeddings, v_i the output of branch i = 1..N (with SiT's gate, without beta), h_l the input of branch l,
before its norm, and h_{N+1} the output of the last block. With fixed shortcuts these inputs are sums,

    h_l = sum_{i < l} M_li v_i,    M_li = beta_i alpha_{i+1} ... alpha_{l-1},    beta_0 = 1.

A merge of a long skip adds a source, its output m_j: W s + b if the skip is added to x, or W [x, s] + b if W maps both.
A W of the second kind is a **boundary**: m_j contains all earlier outputs, so they have no weights of their own behind
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.decay.connection import Connection
from uvit_decay.decay.depth_attention import SHARED, DepthReader
from uvit_decay.decay.weights import Shortcuts, Weights
from uvit_decay.terminal.errors import explain
from uvit_decay.terminal.typed import check_types


class Merge(NamedTuple):
    """Merge of a long skip before branch `branch`, counted from 0; with `boundary` W also maps the stream."""

    branch: int
    boundary: bool


@runtime_checkable
class HasShortcuts(Protocol):
    """Module with the connections of its residual branches and, perhaps, one more for its output.

    `merges` are the merges of long skips into the decayed stream, in execution order.
    """

    shortcuts: Shortcuts
    connections: Sequence[Connection]
    merges: tuple[Merge, ...]


@check_types
def mixing_matrix(of: Shortcuts | HasShortcuts, *inputs: Tensor) -> Float[Tensor, "rows sources"]:
    """Return M, (N + 1, N + 1 + merges) float64: rows are h_1 .. h_{N+1}, columns v_0 .. v_N and then the merges m_j.

    It is exact for shortcuts that are numbers. Learned weights have their current values, and weights of channels their
    means over channels. Attention over depth is measured and averaged over the tokens of a batch. Other connections,
    such as hyper-2, are refused. Each branch reads h_l through a norm, so only the ratios within a row matter. The
    embeddings of a ResNet are the output of its stem; its ReLU and projections are left out.

    Args:
        of: shortcuts (`decay.shortcuts`), a network of `uvit_decay.nn`, or the result of `decay.attach`.
        inputs: the arguments of the network's forward pass, only for attention over depth.
    """
    if isinstance(of, Shortcuts):
        of.check_numbers("only a network and a batch of inputs have a mixing matrix")
        numbers = zip(of.alphas, of.betas, of.scales, strict=True)
        return _multiply_out([Weights(*weights) for weights in numbers], ())
    reader = depth_reader(of)
    if reader is not None:
        with explain(f"attention over depth needs `inputs`, the arguments of the {type(of).__name__}", TypeError):
            signature(of.forward).bind(*inputs)
        measured = MixingSums(reader, len(of.merges))
        try:
            with torch.no_grad():
                of(*inputs)
        finally:
            measured.remove()
        return mixing_of(measured.sums())
    of.shortcuts.check_numbers("the mixing matrix")
    current = [connection.weights() for connection in of.connections[: len(of.shortcuts.alphas)]]
    return _multiply_out(current, of.merges)


def depth_reader(of: HasShortcuts) -> DepthReader | None:
    """Return the queries of a network with attention over depth, or None for other connections."""
    return of.connections[0].shared.get(SHARED)


def _multiply_out(weights: Sequence[Weights], merges: Sequence[Merge]) -> Float[Tensor, "rows sources"]:
    """Return the mixing matrix of fixed shortcuts."""
    # `row` is the stream as a combination of the sources. A merge replaces the stream by a source of its own if it is a
    # boundary, and otherwise adds the source; a branch scales the stream by alpha and adds its own source by beta.
    count = len(weights)
    row = torch.zeros(count + 1 + len(merges), dtype=torch.float64)
    row[0] = 1.0
    rows = []
    for k, branch in enumerate(weights):
        for j, merge in enumerate(merges):
            if merge.branch == k:
                row = row.clone()
                if merge.boundary:
                    row.zero_()
                row[count + 1 + j] = 1.0
        rows.append(row)
        row = _mean(branch.alpha) * row
        row[k + 1] = _mean(branch.beta)
    return torch.stack([*rows, row])


def _mean(weight: float | Tensor) -> float:
    """Return a weight as a number; the mean over channels of a weight of channels."""
    if isinstance(weight, Tensor):
        return float(weight.detach().double().mean())
    return weight


class MixingSums:
    """Sums of the weights of all readers over the tokens of several forward passes, on the device of the network.

    A branch behind the merge of a long skip is read twice, before and after it; the reading after it is the branch's.
    The queries of `reader` get hooks until `remove`.
    """

    def __init__(self, reader: DepthReader, merges: int) -> None:
        self.branches = reader.branches
        self.merges = merges
        self._totals: dict[tuple[int, int], Tensor] = {}  # by number of branches and of merges before the reader
        self._columns: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._handles = []
        for written, query in enumerate(reader.queries, start=1):
            self._handles.append(query.register_forward_hook(partial(self._add, written)))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _add(self, written: int, query: nn.Module, args: tuple[Tensor, Sequence[Any]], h: Tensor) -> None:
        """Add the weights with which the reader after `written` branches has seen its sources (hook of its query)."""
        weights, seen = args
        merged = 0
        for source in seen:
            merged += source.columns[0] > self.branches
        key = written, merged
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
