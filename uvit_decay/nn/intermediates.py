"""Named intermediate token states of a network, for probes.

A network with this interface yields its token states layer by layer, so that one forward pass gives the features of all
layers without hooks, which would change a compiled graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from uvit_decay.runtime.errors import UserError

Pool = Literal["mean", "all"]


@dataclass(frozen=True)
class Layer:
    """Point of a network whose token state can be read: layer 0 is after the embeddings, layer i after block i.

    `name` is the name of the module whose output it is.
    """

    name: str
    kind: Literal["embeddings", "encoder", "middle", "decoder"]


@runtime_checkable
class HasIntermediates(Protocol):
    """Network with readable token states of `dim` features; the first `num_prefix_tokens` are of time and label."""

    layers: tuple[Layer, ...]
    num_prefix_tokens: int
    dim: int

    def forward_intermediates(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the token state (b, n, d) of each layer, in order."""


def layer_indices(layers: Sequence[Layer], names: Sequence[str] | None) -> list[int]:
    """Return the indices of the layers with these indices or names, ascending; None means all."""
    if names is None:
        return list(range(len(layers)))
    known = {**{str(i): i for i in range(len(layers))}, **{layer.name: i for i, layer in enumerate(layers)}}
    unknown = [name for name in names if name not in known]
    if unknown:
        names = ", ".join(layer.name for layer in layers)
        raise UserError(f"no layer {unknown[0]}: there are 0 to {len(layers) - 1}, or {names}")
    return sorted({known[name] for name in names})


def pooled_features(
    net: HasIntermediates, x: Float[Tensor, "b c h w"], t: Float[Tensor, " b"], pool: Pool = "mean"
) -> Float[Tensor, "layers b d"]:
    """Return the float32 mean of the patch tokens (pool "all": of all tokens) at every layer, with the null label."""
    first = net.num_prefix_tokens if pool == "mean" else 0
    return torch.stack([state[:, first:].float().mean(dim=1) for state in net.forward_intermediates(x, t)])
