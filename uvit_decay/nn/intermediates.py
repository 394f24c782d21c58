"""Named intermediate token states of a network, for probes.

A network with this interface yields its token states layer by layer, so that one forward pass gives the features of all
layers without hooks, which would change a compiled graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.runtime.errors import UserError

Pool = Literal["mean", "all", "cls"]


@dataclass(frozen=True)
class Layer:
    """Point of a network whose token state can be read: layer 0 is after the embeddings, layer i after block i.

    `name` is the name of the module whose output it is.
    """

    name: str
    kind: Literal["embeddings", "encoder", "middle", "decoder"]


def block_layers(blocks: Collection[str], denoiser: bool) -> tuple[Layer, ...]:
    """Return the layers of a network with these blocks; a denoiser has an encoder, then a decoder.

    An odd number of them has a middle block.
    """
    half, odd = divmod(len(blocks), 2)
    kinds = ["encoder"] * half + ["middle"] * odd + ["decoder"] * half if denoiser else ["encoder"] * len(blocks)
    return (Layer("embeddings", "embeddings"), *map(Layer, blocks, kinds))


@runtime_checkable
class HasIntermediates(Protocol):
    """Network with readable token states of `dim` features; the first `num_prefix_tokens` tokens are not patches.

    For auxiliary losses its forward has an argument `layers`, indices into `layers`, ascending. If it is given, forward
    returns (output, token states of these layers), otherwise the output alone.
    """

    layers: tuple[Layer, ...]
    num_prefix_tokens: int
    dim: int

    def forward_intermediates(self, x: Tensor, *conditions: Tensor) -> Iterator[Tensor]:
        """Yield the token state (b, n, d) of each layer, in order.

        A denoiser takes times (b,) and labels, without which it has the null label; an encoder takes no conditions.
        """


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


def states_of(
    net: HasIntermediates, layers: Sequence[int], x: Float[Tensor, "b c h w"], *conditions: Tensor
) -> Iterator[Tensor]:
    """Yield the token states of these layers (ascending); later ones never run."""
    up_to_last = zip(range(layers[-1] + 1), net.forward_intermediates(x, *conditions), strict=False)
    return (state for i, state in up_to_last if i in layers)


def last_and_kept(states: Iterator[Tensor], layers: Collection[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the last of all token states, and the states of the layers with these indices, ascending."""
    kept = []
    for i, state in enumerate(states):
        if i in layers:
            kept.append(state)
    return state, tuple(kept)


def layer_blocks(net: nn.Module) -> list[nn.Module]:
    """Return the blocks whose outputs are layers of a network; none if its layers are not known."""
    layers = net.layers if isinstance(net, HasIntermediates) else ()
    return [net.get_submodule(layer.name) for layer in layers if layer.kind != "embeddings"]


def has_class_token(net: HasIntermediates) -> bool:
    """Return whether the network's token 0 is a class token; one of a user's that does not say so has none."""
    return getattr(net, "class_token", False)


def check_pool(net: HasIntermediates, pool: Pool) -> None:
    """Raise a UserError for pool "cls" of a network without a class token."""
    if pool == "cls" and not has_class_token(net):
        raise UserError(f"{type(net).__name__} has no class token: pool mean (patch tokens) or all")


def pooled(state: Float[Tensor, "b n d"], pool: Pool, prefix: int) -> Float[Tensor, "b d"]:
    """Return the float32 mean of the tokens after the first `prefix` ones, of all tokens, or token 0 (pool "cls")."""
    if pool == "cls":
        return state[:, 0].float()
    return state[:, prefix if pool == "mean" else 0 :].float().mean(dim=1)
