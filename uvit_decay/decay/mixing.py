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
from inspect import signature
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.decay.schedule import branch_weights
from uvit_decay.decay.table import Shortcuts, Weights
from uvit_decay.terminal.errors import UserError, explain
from uvit_decay.terminal.typed import check_types


class Merge(NamedTuple):
    """Merge of a long skip before branch `branch`, counted from 0; with `boundary` W also maps the stream."""

    branch: int
    boundary: bool


@runtime_checkable
class HasShortcuts(Protocol):
    """Module with the weights of its residual branches, see `decay.register_weights`.

    `merges` are the merges of long skips into the decayed stream, in execution order.
    """

    shortcuts: Shortcuts
    merges: tuple[Merge, ...]


@check_types
def mixing_matrix(of: Shortcuts | nn.Module, *inputs: Tensor) -> Float[Tensor, "rows sources"]:
    """Return M, (N + 1, N + 1 + merges) float64: rows are h_1 .. h_{N+1}, columns v_0 .. v_N and then the merges m_j.

    It is exact for every kind of shortcut. Learned weights have their current values, and weights of channels their
    means over channels. Attention over depth is measured and averaged over the tokens of a batch. Each branch reads h_l
    through a norm, so only the ratios within a row matter. The embeddings of a ResNet are the output of its stem; its
    ReLU and projections are left out.

    Args:
        of: shortcuts (`decay.shortcuts`), a network of `uvit_decay.nn`, or the result of `decay.attach`.
        inputs: the arguments of the network's forward pass, only for attention over depth.
    """
    if isinstance(of, Shortcuts):
        if of.depth is not None:
            raise UserError("attention over depth has a mixing matrix only on a batch; give a network and its inputs")
        numbers = zip(of.alphas, of.betas, of.scales, strict=True)
        return _multiply_out([Weights(*weights) for weights in numbers], ())
    if not isinstance(of, HasShortcuts):
        kind = type(of).__name__
        raise UserError(f"cannot compute a mixing matrix of a {kind}: it has no shortcuts; give a network or shortcuts")
    if of.shortcuts.depth is not None:
        with explain(f"attention over depth needs `inputs`, the arguments of the {type(of).__name__}", TypeError):
            signature(of.forward).bind(*inputs)
        return of.measure_mixing(*inputs)
    current = [branch_weights(of, of.shortcuts, k) for k in range(len(of.shortcuts.alphas))]
    return _multiply_out(current, of.merges)


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
