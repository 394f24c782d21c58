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
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.typed import check_types


class Merge(NamedTuple):
    """Merge of a long skip before branch `branch`, counted from 0; with `boundary` W also maps the stream."""

    branch: int
    boundary: bool


@runtime_checkable
class HasShortcuts(Protocol):
    """Module with the weights of its residual branches, see `decay.register_weights`."""

    shortcuts: Shortcuts


@runtime_checkable
class HasMerges(Protocol):
    """Module with the merges of long skips into the decayed stream, in execution order."""

    merges: tuple[Merge, ...]


@runtime_checkable
class MeasuresMixing(Protocol):
    """Network whose mixing matrix depends on its input: `measure_mixing(*inputs)` runs it and returns the matrix."""

    def measure_mixing(self, *inputs: Tensor) -> Float[Tensor, "rows sources"]:
        """Return the matrix of a batch, averaged over its tokens."""


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

    Raises:
        UserError: an object without shortcuts, or attention over depth without a network and a batch that fits it.
    """
    if not isinstance(of, Shortcuts | HasShortcuts):
        kind = type(of).__name__
        raise UserError(f"cannot compute a mixing matrix of a {kind}: it has no shortcuts; give a network or shortcuts")
    shortcuts = of if isinstance(of, Shortcuts) else of.shortcuts
    if shortcuts.depth is not None:
        if not (isinstance(of, MeasuresMixing) and inputs):
            raise UserError("attention over depth has a mixing matrix only on a batch; give a network and its inputs")
        _check_inputs(of, inputs)
        return of.measure_mixing(*inputs)
    merges = of.merges if isinstance(of, HasMerges) else ()
    return _multiply_out(_all_weights(of, shortcuts), merges)


def _check_inputs(network: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raise a UserError unless the forward pass of a network takes this number of inputs."""
    try:
        signature(network.forward).bind(*inputs)
    except TypeError as error:
        kind = type(network).__name__
        raise UserError(f"inputs of mixing_matrix must be the arguments of the {kind}'s forward: {error}") from None


def _all_weights(of: Shortcuts | nn.Module, shortcuts: Shortcuts) -> list[Weights]:
    """Return the weights of all branches: the numbers of shortcuts, or the current values of a network."""
    if isinstance(of, Shortcuts):
        numbers = zip(of.alphas, of.betas, of.scales, strict=True)
        return [Weights(alpha, beta, scale) for alpha, beta, scale in numbers]
    return [branch_weights(of, shortcuts, k) for k in range(len(shortcuts.alphas))]


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
