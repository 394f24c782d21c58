"""Named intermediate token states of a network, for probes.

A network with this interface yields its token states layer by layer. One forward pass gives the features of all layers,
without hooks, which would change a compiled graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.runtime.constants import Pool
from uvit_decay.terminal.errors import UserError


@dataclass(frozen=True)
class Layer:
    """Point of a network at which the token state can be read: layer 0 after the embeddings, layer i after block i.

    `name` is the name of the module whose output is the token state.
    """

    name: str
    kind: Literal["embeddings", "encoder", "middle", "decoder"]


def block_layers(blocks: Collection[str], denoiser: bool) -> tuple[Layer, ...]:
    """Return the layers of a network, given the names of its blocks.

    The blocks of a denoiser are an encoder, a middle block if their number is odd, and a decoder. Otherwise all blocks
    are an encoder.
    """
    if denoiser:
        half, odd = divmod(len(blocks), 2)
        kinds = ["encoder"] * half + ["middle"] * odd + ["decoder"] * half
    else:
        kinds = ["encoder"] * len(blocks)
    return (Layer("embeddings", "embeddings"), *map(Layer, blocks, kinds))


@runtime_checkable
class HasIntermediates(Protocol):
    """Network with readable token states of `dim` features; the first `num_prefix_tokens` tokens are not patches.

    Auxiliary losses call its forward with an argument `layers`: ascending indices into the attribute `layers`. Forward
    then returns (output, token states of these layers), and without the argument the output alone.
    """

    layers: tuple[Layer, ...]
    num_prefix_tokens: int
    dim: int

    def forward_intermediates(self, x: Tensor, *conditions: Tensor) -> Iterator[Tensor]:
        """Yield the token state (b, n, d) of each layer, in order.

        The conditions of a denoiser are times (b,) and optional labels (b,); None is the null label. An encoder has no
        conditions.
        """


@runtime_checkable
class PoolsFeatures(Protocol):
    """Network whose classifier is a function of `dim` pooled features; `num_classes` is 0 without a classifier."""

    num_classes: int
    dim: int

    def pooled(self, x: Tensor) -> Tensor:
        """Return the input of the classifier, (b, d), of images (b, c, h, w)."""

    def classify(self, features: Tensor) -> Tensor:
        """Return the logits (b, num_classes) of pooled features (b, d)."""


def layer_indices(layers: Sequence[Layer], names: Sequence[str] | None) -> list[int]:
    """Return the ascending indices of the layers `names`, which are names or indices as strings; None means all."""
    if names is None:
        return list(range(len(layers)))
    known = {str(i): i for i in range(len(layers))}
    for i, layer in enumerate(layers):
        known[layer.name] = i
    indices = set()
    for name in names:
        if name not in known:
            available = ", ".join(layer.name for layer in layers)
            raise UserError(f"no layer {name}: give an index from 0 to {len(layers) - 1}, or one of {available}")
        indices.add(known[name])
    return sorted(indices)


def states_of(
    net: HasIntermediates, layers: Sequence[int], x: Float[Tensor, "b c h w"], *conditions: Tensor
) -> Iterator[Tensor]:
    """Yield the token states (b, n, d) of the layers with these ascending indices; later layers are not computed."""
    # range comes first: zip then stops without asking the network for a further state.
    up_to_last = zip(range(layers[-1] + 1), net.forward_intermediates(x, *conditions), strict=False)
    return (state for i, state in up_to_last if i in layers)


def layer_blocks(net: nn.Module) -> list[nn.Module]:
    """Return the blocks whose outputs are layers of a network; an empty list without `HasIntermediates`."""
    if not isinstance(net, HasIntermediates):
        return []
    return [net.get_submodule(layer.name) for layer in net.layers if layer.kind != "embeddings"]


def has_class_token(net: HasIntermediates) -> bool:
    """Return whether token 0 of the network is a class token; False if it lacks the attribute `class_token`."""
    return getattr(net, "class_token", False)


def check_pool(net: HasIntermediates, pool: Pool) -> None:
    """Raise a UserError if the pool is "cls" and the network has no class token."""
    if pool == "cls" and not has_class_token(net):
        raise UserError(f"pool cls: {type(net).__name__} has no class token; set pool to mean (patch tokens) or all")


def pooled(state: Float[Tensor, "b n d"], pool: Pool, prefix: int) -> Float[Tensor, "b d"]:
    """Return pooled tokens in float32: token 0 (cls), the mean after the first `prefix` tokens (mean), or of all."""
    if pool == "cls":
        return state[:, 0].float()
    first = prefix if pool == "mean" else 0
    return state[:, first:].float().mean(dim=1)
