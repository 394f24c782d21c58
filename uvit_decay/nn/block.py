"""Pre-norm transformer blocks, whose branches have connections (`uvit_decay.decay.connection`).

`Block` is used by U-ViT, ViT and MAE, `AdaLNBlock` by SiT. Parameters have the official names. The residual stream x
keeps its dtype, float32 under autocast; only the outputs of branches have autocast's dtype.
b = batch, n = tokens, d = width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.decay.connection import Connection, State, Tokens
from uvit_decay.decay.weights import Weighted
from uvit_decay.nn.base import Rows
from uvit_decay.nn.layers import PUBLISHED, LayerFactory
from uvit_decay.nn.long_skips import MergeWeights, merge_linear, scale_skip
from uvit_decay.runtime.precision import without_autocast

SkipMerge = Literal["add", "concat"]


class Block(nn.Module):
    """Attention and MLP branches; an output block first merges a long skip by concatenation.

    `connections` are those of the two branches; a network replaces the plain ones.
    """

    gates = ()

    def __init__(
        self,
        dim: int,
        heads: int,
        factory: LayerFactory = PUBLISHED,
        qkv_bias: bool = False,
        skip: bool = False,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm1 = factory.build_norm(dim, eps)
        self.attn = factory.build_attention(dim, heads, qkv_bias, eps)
        self.norm2 = factory.build_norm(dim, eps)
        self.mlp = factory.build_mlp(dim)
        self.last_layers = ("attn.proj", f"mlp.{self.mlp.last_layer}")
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None
        self.connections: tuple[Connection, Connection] = (Weighted(), Weighted())

    def forward(
        self,
        state: State,
        skip: Tokens | None = None,
        merge: MergeWeights | None = None,
        keep: Float[Tensor, "2 b 1 1"] | None = None,
    ) -> State:
        """Return the state after attention and MLP; a plain state is the tokens (b, n, d).

        Args:
            state: the state, see `uvit_decay.decay.connection`.
            skip: the long skip (b, n, d), if and only if the block was built with skip=True.
            merge: factors of the long skip, None if it is not scaled.
            keep: factors of the outputs of both branches, for stochastic depth.
        """
        first, second = self.connections
        keep1, keep2 = (None, None) if keep is None else keep
        if self.skip_linear is not None:
            merged = merge_skip(self.skip_linear, first.end(state), skip, merge)
            state = first.merge(state, merged, added=False)
        normed = first.rescale(self.norm1(first.read(state)))
        state = first(state, self.attn(normed), keep1)
        normed = second.rescale(self.norm2(second.read(state)))
        return second(state, self.mlp(normed), keep2)

    def zero_init(self) -> None:
        """Zero the last linear layer of both branches, so that their outputs start at 0 (Sec. 3 of the paper).

        Training with a small alpha_min is stable only with this initialisation.
        """
        for layer in self.last_layers:
            zero_linear(self.get_submodule(layer))


class AdaLNBlock(nn.Module):
    """DiT's adaLN-Zero block: attention and MLP branches, both modulated by a condition c.

    Shift, scale and gate of both branches are a linear map of SiLU(c). A decoder block first merges a long skip s:
    x + W s + b (`add`, the authors' SiT) or W [x, s] + b (`concat`, as in U-ViT). A gate is part of a branch's output.
    """

    gates = (Rows("adaLN_modulation.1", 2, 6), Rows("adaLN_modulation.1", 5, 6))

    def __init__(
        self,
        dim: int,
        heads: int,
        factory: LayerFactory = PUBLISHED,
        skip: SkipMerge | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = factory.build_norm(dim, eps=1e-6, affine=False)
        self.attn = factory.build_attention(dim, heads, qkv_bias=True, eps=1e-6)
        self.norm2 = factory.build_norm(dim, eps=1e-6, affine=False)
        self.mlp = factory.build_mlp(dim, "tanh")
        self.last_layers = ("attn.proj", f"mlp.{self.mlp.last_layer}")
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.concat = skip == "concat"
        self.skip: nn.Linear | None = None
        if skip is not None:
            width = 2 * dim if self.concat else dim
            self.skip = nn.Linear(width, dim)
        self.connections: tuple[Connection, Connection] = (Weighted(), Weighted())

    def forward(
        self,
        state: State,
        c: Float[Tensor, "b d"],
        skip: Tokens | None = None,
        merge: MergeWeights | None = None,
        keep: Float[Tensor, "2 b 1 1"] | None = None,
    ) -> State:
        """Return the state after attention and MLP, given the condition c; other arguments are those of `Block`."""
        first, second = self.connections
        keep1, keep2 = (None, None) if keep is None else keep
        if self.concat:
            merged = merge_skip(self.skip, first.end(state), skip, merge)
            state = first.merge(state, merged, added=False)
        elif self.skip is not None:
            merged = merge_linear(self.skip, scale_skip(skip, merge), merge)
            state = first.merge(state, merged, added=True)
        # The rows are in the official order: attention before MLP, each with shift, scale, gate.
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        normed = first.rescale(self.norm1(first.read(state)))
        state = first(state, gate1 * self.attn(modulate(normed, shift1, scale1)), keep1)
        normed = second.rescale(self.norm2(second.read(state)))
        return second(state, gate2 * self.mlp(modulate(normed, shift2, scale2)), keep2)

    def zero_init(self) -> None:
        """Zero the modulation, so that both gates are 0 and both branches start silent (adaLN-Zero)."""
        zero_linear(self.adaLN_modulation[1])


class AdaLNHead(nn.Module):
    """Output head: norm modulated by the condition c, then a linear map to `out` values per token; without autocast."""

    def __init__(self, dim: int, out: int, factory: LayerFactory = PUBLISHED) -> None:
        super().__init__()
        self.norm_final = factory.build_norm(dim, eps=1e-6, affine=False)
        self.linear = nn.Linear(dim, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tokens, c: Float[Tensor, "b d"]) -> Float[Tensor, "b n out"]:
        with without_autocast(x):
            shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=-1)
            return self.linear(modulate(self.norm_final(x), shift, scale))

    def zero_init(self) -> None:
        """Zero the modulation and the linear map, so that an untrained network outputs 0 (adaLN-Zero)."""
        zero_linear(self.adaLN_modulation[1])
        zero_linear(self.linear)


def merge_skip(layer: nn.Linear, x: Tokens, skip: Tokens, weights: MergeWeights | None = None) -> Tokens:
    """Return W [x, c skip] + d b in the dtype of the residual stream x, with the factors c and d of `weights`."""
    both = torch.cat([x, scale_skip(skip, weights)], dim=-1)
    return merge_linear(layer, both, weights).to(x.dtype)


def modulate(x: Tokens, shift: Float[Tensor, "b 1 d"], scale: Float[Tensor, "b 1 d"]) -> Tokens:
    """Return x (1 + scale) + shift, computed by one fused operation."""
    return torch.addcmul(shift, x, 1 + scale)


def zero_linear(linear: nn.Linear) -> None:
    """Zero the weight and the bias of a linear layer."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


def init_linears(net: nn.Module, init_weight: Callable[[Tensor], Any]) -> None:
    """Apply `init_weight` to the weight of every linear layer of `net` and zero the biases."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            init_weight(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
