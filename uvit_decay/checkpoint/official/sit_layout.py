"""Conversions between the published layouts of SiT's state_dict.

Names are those of `SiT`; p = patch size, c = channels, d = width. Inputs are not changed, outputs share their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from uvit_decay.runtime.errors import UserError


def to_decayed_wiring(state: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Convert weights of wiring `official` to wiring `decayed` with skip `add`: the same function at the same alphas.

    blocks.i becomes enc_blocks.i in the first half and dec_blocks.(i - depth/2) in the second, whose skips are zero.

    Raises:
        UserError: odd depth, or weights whose blocks are not 0 to depth - 1.
    """
    if depth % 2:
        raise UserError(f"depth must be even, since encoder and decoder blocks come in pairs, got {depth}")
    found = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    if found != {str(i) for i in range(depth)}:
        raise UserError(f"these are not the weights of an official SiT of depth {depth}: they have {len(found)} blocks")
    half, renamed = depth // 2, {}
    for name, value in state.items():
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            i = int(number)
            name = f"enc_blocks.{i}.{rest}" if i < half else f"dec_blocks.{i - half}.{rest}"
        renamed[name] = value
    for j in range(half):
        like = renamed[f"dec_blocks.{j}.attn.proj.weight"]
        renamed[f"dec_blocks.{j}.skip.weight"] = torch.zeros_like(like)
        renamed[f"dec_blocks.{j}.skip.bias"] = torch.zeros_like(like[0])
    return renamed


def without_sigma(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the half of the head that a network with learn_sigma does not use; return other weights unchanged.

    The head's rows are ordered (p, p, 2c); the first c channels are kept, so that the function stays the same.

    Raises:
        UserError: weights without SiT's patches or head, or a head that fits neither.
    """
    patches, head, bias = "x_embedder.proj.weight", "final_layer.linear.weight", "final_layer.linear.bias"
    for name in (patches, head, bias):
        if name not in state:
            raise UserError(f"these are not the weights of a SiT: they lack {name}")
    _, channels, patch, _ = state[patches].shape
    rows, plain = len(state[head]), patch * patch * channels
    if rows not in (plain, 2 * plain):
        raise UserError(f"the head has {rows} rows, a patch of {patch}x{patch}x{channels} needs {plain} or {2 * plain}")
    if rows == plain:
        return dict(state)
    kept = {name: state[name].unflatten(0, (-1, 2 * channels))[:, :channels].flatten(0, 1) for name in (head, bias)}
    return {**state, **kept}
