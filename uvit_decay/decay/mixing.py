"""The mixing matrix: the weight of every branch's output in the input of every later branch.

Let v_0 be the embeddings, v_i the output of branch i = 1..N (with SiT's gate, without beta), h_l the input of branch l,
before its norm, and h_{N+1} the output of the last block. With fixed shortcuts these inputs are sums,

    h_l = sum_{i < l} M_li v_i,    M_li = beta_i alpha_{i+1} ... alpha_{l-1},    beta_0 = 1.

A merge of a long skip adds a source, its output m_j: W s + b where the skip is added to x, and W [x, s] + b where W is
learned for both. Such a W is a **boundary**: what came before it is in m_j and has no weight of its own behind it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.decay.schedule import branch_weights
from uvit_decay.decay.table import Shortcuts, Weights
from uvit_decay.runtime.errors import UserError


class Merge(NamedTuple):
    """A long skip that is merged before a branch, counted from 0; `boundary` says whether W reads the stream, too."""

    branch: int
    boundary: bool


@runtime_checkable
class HasShortcuts(Protocol):
    """Module with the weights of its residual branches, see `decay.register_weights`."""

    shortcuts: Shortcuts


@runtime_checkable
class HasMerges(Protocol):
    """Module that says where it merges long skips into the decayed stream, in execution order."""

    merges: tuple[Merge, ...]


def mixing_matrix(of: Shortcuts | nn.Module) -> Float[Tensor, "rows sources"]:
    """Return M, (N + 1, N + 1 + merges) float64: rows are h_1 .. h_{N+1}, columns v_0 .. v_N and then the merges m_j.

    Exact for every kind of shortcut, with the present values of learned weights; of weights for each channel it has
    the means over channels. A norm reads h_l, so only the ratios within a row matter to a branch. The embeddings of a
    ResNet are the output of its stem, and its ReLU and projections are left out.

    Args:
        of: shortcuts (`decay.shortcuts`), a network of `uvit_decay.nn`, or what `decay.attach` returned.

    Raises:
        UserError: an object without shortcuts.
    """
    if isinstance(of, Shortcuts):
        weights = [Weights(*numbers) for numbers in zip(of.alphas, of.betas, of.scales, strict=True)]
    elif isinstance(of, HasShortcuts):
        weights = [branch_weights(of, of.shortcuts, k) for k in range(len(of.shortcuts.alphas))]
    else:
        kind = type(of).__name__
        raise UserError(f"cannot compute a mixing matrix of a {kind}: it has no shortcuts; give a network or shortcuts")
    merges = of.merges if isinstance(of, HasMerges) else ()
    count = len(weights)
    row = torch.zeros(count + 1 + len(merges), dtype=torch.float64)
    row[0] = 1.0
    rows = []
    for k, branch in enumerate(weights):
        for j, merge in enumerate(merges):
            if merge.branch == k:
                row = torch.zeros_like(row) if merge.boundary else row.clone()
                row[count + 1 + j] = 1.0
        rows.append(row)
        row = _mean(branch.alpha) * row
        row[k + 1] = _mean(branch.beta)
    return torch.stack([*rows, row])


def _mean(weight: float | Tensor) -> float:
    """Return a weight, or the mean of the weights of all channels."""
    return float(weight.detach().double().mean()) if isinstance(weight, Tensor) else weight
