"""Named intermediates: what a network shows to probes.

A tapped network yields its token states one stage after the other, so that a probe reads all layers in one forward pass
and never touches a compiled graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Pool = Literal["mean", "all"]


@dataclass(frozen=True)
class Stage:
    """A place in a network: `name` is the module whose output it is, stage 0 the embeddings, stage i after block i."""

    name: str
    kind: Literal["embeddings", "encoder", "middle", "decoder"]


@runtime_checkable
class Tapped(Protocol):
    """A network that can be probed: tokens have `dim` features, the first `extras` are no patches (time, label)."""

    stages: tuple[Stage, ...]
    extras: int
    dim: int

    def trunk(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Iterator[Tensor]:
        """Token states (b, n, d), one for each stage, in order."""


def pooled_features(
    net: Tapped, x: Float[Tensor, "b c h w"], t: Float[Tensor, " b"], pool: Pool = "mean"
) -> Float[Tensor, "stages b d"]:
    """Float32 mean of the patch tokens (`pool` all: of all tokens) after every stage, under the null label."""
    first = net.extras if pool == "mean" else 0
    return torch.stack([state[:, first:].float().mean(dim=1) for state in net.trunk(x, t)])
